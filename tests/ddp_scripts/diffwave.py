"""A learner like DiffWave's: it is given the wrapped model, has `is_master`, and a `state_dict` of its own."""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ddp_scripts.model import Net, batch


class Learner:
    def __init__(self, model_dir, model, dataset, optimizer):
        os.makedirs(model_dir, exist_ok=True)
        self.model_dir = model_dir
        self.model = model
        self.dataset = dataset
        self.optimizer = optimizer
        self.scaler = torch.amp.GradScaler("cpu", enabled=True)
        self.step = 0
        self.is_master = True
        self.losses = []

    def state_dict(self):
        if hasattr(self.model, "module") and isinstance(self.model.module, nn.Module):
            model_state = self.model.module.state_dict()
        else:
            model_state = self.model.state_dict()
        return {
            "step": self.step,
            "model": {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in model_state.items()},
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state_dict):
        if hasattr(self.model, "module") and isinstance(self.model.module, nn.Module):
            self.model.module.load_state_dict(state_dict["model"])
        else:
            self.model.load_state_dict(state_dict["model"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        self.scaler.load_state_dict(state_dict["scaler"])
        self.step = state_dict["step"]

    def save_to_checkpoint(self, filename="weights"):
        save_basename = f"{filename}-{self.step}.pt"
        link_name = f"{self.model_dir}/{filename}.pt"
        torch.save(self.state_dict(), f"{self.model_dir}/{save_basename}")
        if os.path.islink(link_name):
            os.unlink(link_name)
        os.symlink(save_basename, link_name)

    def restore_from_checkpoint(self, filename="weights"):
        try:
            checkpoint = torch.load(f"{self.model_dir}/{filename}.pt")
            self.load_state_dict(checkpoint)
            return True
        except FileNotFoundError:
            return False

    def train(self, max_steps):
        while True:
            for features in self.dataset:
                if self.step >= max_steps:
                    return
                loss = self.train_step(*features)
                self.losses.append(loss.item())
                if self.is_master:
                    if self.step % 2 == 0:
                        self._write_summary(self.step, loss)
                    if self.step % len(self.dataset) == 2:
                        self.save_to_checkpoint()
                self.step += 1

    def train_step(self, audio, target):
        for param in self.model.parameters():
            param.grad = None
        loss = F.l1_loss(self.model(audio), target)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def _write_summary(self, step, loss):
        print(f"step {step}: loss {loss.item():.4f}, gradient norm {self.grad_norm:.4f}")


def _train_impl(replica_id, model, dataset):
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    learner = Learner("models", model, dataset, opt)
    learner.is_master = replica_id == 0
    learner.restore_from_checkpoint()
    learner.train(max_steps=6)
    return learner.losses


def train_distributed(replica_id):
    torch.manual_seed(0)
    model = Net().double()
    model = DistributedDataParallel(model)
    return _train_impl(replica_id, model, [batch(step, replica_id) for step in range(4)])


if __name__ == "__main__":
    losses = train_distributed(int(os.environ["RANK"]))

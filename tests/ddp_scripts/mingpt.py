"""A `Trainer` like minGPT's: the optimizer is handed in, and a snapshot holds model and optimizer."""

import os
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.ddp_scripts.model import Net, batch


@dataclass
class Snapshot:
    model_state: dict[str, Any]
    optimizer_state: dict[str, Any]
    finished_epoch: int


class Trainer:
    def __init__(self, model, optimizer, max_epochs, snapshot_path="snapshot.pt"):
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.max_epochs, self.snapshot_path = max_epochs, snapshot_path
        self.epochs_run, self.save_every, self.losses = 0, 3, []
        self.model = model.to("cpu")
        self.optimizer = optimizer
        self._load_snapshot()
        self.model = DDP(self.model)

    def _load_snapshot(self):
        try:
            snapshot_data = torch.load(self.snapshot_path, map_location="cpu")
        except FileNotFoundError:
            print("Snapshot not found. Training model from scratch")
            return
        snapshot = Snapshot(**snapshot_data)
        self.model.load_state_dict(snapshot.model_state)
        self.optimizer.load_state_dict(snapshot.optimizer_state)
        self.epochs_run = snapshot.finished_epoch

    def _run_batch(self, source, targets, train=True):
        with torch.set_grad_enabled(train):
            loss = F.mse_loss(self.model(source), targets)
        if train:
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
        self.losses.append(loss.item())

    def _save_snapshot(self, epoch):
        model = self.model
        raw_model = model.module if hasattr(model, "module") else model
        snapshot = Snapshot(
            model_state=raw_model.state_dict(),
            optimizer_state=self.optimizer.state_dict(),
            finished_epoch=epoch,
        )
        torch.save(asdict(snapshot), self.snapshot_path)

    def train(self):
        for epoch in range(self.epochs_run, self.max_epochs):
            epoch += 1
            self._run_batch(*batch(epoch, self.local_rank))
            if self.local_rank == 0 and epoch % self.save_every == 0:
                self._save_snapshot(epoch)
            self._run_batch(*batch(100 + epoch, self.local_rank), train=False)


def get_train_objs():
    torch.manual_seed(0)
    model = Net().double()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05)


if __name__ == "__main__":
    trainer = Trainer(*get_train_objs(), max_epochs=5)
    trainer.train()
    losses = trainer.losses

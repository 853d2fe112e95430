"""Trainings on a device whose kernels, copies and collectives run late: see README.md here.

pytest collects nothing of this; ``scripts/test_device.sh`` builds the device and runs the cases.
"""

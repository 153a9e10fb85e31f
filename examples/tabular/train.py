"""Train an MLP on a table with a binary label."""

from __future__ import annotations

import sys

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import idletrain

ROUNDS = 3 if "--tiny" in sys.argv else 40


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with label smoothing: any function (outputs, labels) -> scalar will do."""
    return nn.functional.cross_entropy(logits, labels, label_smoothing=0.05)


def main() -> None:
    """Train and print accuracy and the first probabilities."""
    x, y = load_breast_cancer(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, test_size=0.25, random_state=0)
    mean, deviation = x_train.mean(0), x_train.std(0)
    x_train, x_test = (((part - mean) / deviation).astype("float32") for part in (x_train, x_test))
    net = nn.Sequential(
        nn.Linear(30, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.BatchNorm1d(256),
        nn.ReLU(),
        nn.Linear(256, 2),
    )
    result = idletrain.fit(
        net,
        (x_train, y_train),
        test=(x_test, y_test),
        loss=smoothed,
        subnets=2,
        workers=2,
        local_steps=10,
        rounds=ROUNDS,
        batch_size=32,
        optimizer={"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
        evaluate_every=ROUNDS,
    )
    print(f"accuracy {result.summary['accuracy']:.3f}")
    with torch.no_grad():
        print(result.module(torch.from_numpy(x_test[:3])).softmax(1))


if __name__ == "__main__":
    main()

"""Trains a small Keras model on points that can be told apart, alone or with
other processes, and saves it.

python train.py --epochs 5
mpirun -np 2 python train.py --reduce mpi    each rank has its part of the points, gradients are
                                             averaged
python train.py --reduce strategy            on each host, with TF_CONFIG:
                                             MultiWorkerMirroredStrategy
"""

import argparse
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

POINTS = 2048
FEATURES = 16
BATCH = 128


def points(rank, world):
    """Return one rank's part of the points, and the class of each: the sign of a fixed sum."""
    generator = np.random.default_rng(seed=1)
    inputs = generator.normal(size=(POINTS, FEATURES)).astype("float32")
    classes = (inputs @ generator.normal(size=FEATURES) > 0).astype("float32")
    return inputs[rank::world], classes[rank::world, None]


def make_model():
    """Return the model.

    The seed is set before, so that all processes begin with the same weights.
    """
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)]
    )


def average_by_mpi():
    """Return rank, world size, and a function that averages gradients over the ranks of mpirun."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD

    def average(gradients):
        mine = np.concatenate([gradient.numpy().ravel() for gradient in gradients])
        total = np.empty_like(mine)
        world.Allreduce(mine, total)
        parts = np.split(
            total / world.size, np.cumsum([np.prod(each.shape) for each in gradients])[:-1]
        )
        return [tf.reshape(part, each.shape) for part, each in zip(parts, gradients, strict=True)]

    return world.rank, world.size, average


def average_by_strategy():
    """Return rank, world size, and a function that averages gradients over the
    hosts of TF_CONFIG.
    """
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    cluster = strategy.cluster_resolver

    def average(gradients):
        return [strategy.reduce(tf.distribute.ReduceOp.MEAN, each, axis=None) for each in gradients]

    return cluster.task_id, strategy.num_replicas_in_sync, average


def train(epochs, rank, world, average):
    """Train and return the model; every rank prints the loss of each epoch over its own part."""
    inputs, classes = points(rank, world)
    model = make_model()
    optimizer = keras.optimizers.Adam(0.01)
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
    for epoch in range(epochs):
        losses = []
        for start in range(0, len(inputs), BATCH // world):
            part = slice(start, start + BATCH // world)
            with tf.GradientTape() as tape:
                loss = loss_of(classes[part], model(inputs[part]))
            gradients = average(tape.gradient(loss, model.trainable_variables))
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            losses.append(float(loss))
        print(f"epoch {epoch} world {world} rank {rank} loss {np.mean(losses):.4f}", flush=True)
    return model


def main():
    """Read the command line, train, and save the model on the first rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--reduce", choices=("none", "mpi", "strategy"), default="none")
    options, _ = parser.parse_known_args()
    ways = {
        "none": lambda: (0, 1, lambda gradients: gradients),
        "mpi": average_by_mpi,
        "strategy": average_by_strategy,
    }
    rank, world, average = ways[options.reduce]()
    model = train(options.epochs, rank, world, average)
    weights = sum(float(tf.reduce_sum(each)) for each in model.trainable_variables)
    print(f"rank {rank} of {world}: the weights' sum is {weights:.4f}", flush=True)
    if rank == 0:
        model.save(Path(os.environ.get("SM_MODEL_DIR", ".")) / "model.keras")


if __name__ == "__main__":
    main()

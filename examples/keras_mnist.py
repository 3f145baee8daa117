"""The convolutional network of many lectures, in Keras: two changed lines make it a distributed program.

python examples/keras_mnist.py --epochs 3
polyrhythm run examples/keras_mnist.py --workers 2 --strategy allreduce
polyrhythm run examples/keras_mnist.py --workers 2 --strategy async -- --data DIR --limit 6000

DIR has the four files of MNIST or Fashion-MNIST; without it the network learns the embedded digits.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"  # before the first `import keras`

import keras
from keras import layers

from polyrhythm.data import digits, mnist
from polyrhythm.integrations.keras import distribute  # 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="images per worker and step")
    parser.add_argument("--data", metavar="DIR", help="folder with the four files in MNIST format")
    parser.add_argument("--limit", type=int, metavar="N", help="train on the first N images only")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def network(size: int) -> keras.Model:
    """For images of this size, with one channel."""
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(32, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )


def main() -> None:
    args = arguments()
    keras.utils.set_random_seed(args.seed)
    (x, y), test = [
        (images.permute(0, 2, 3, 1).numpy(), keras.utils.to_categorical(labels.numpy(), 10))
        for images, labels in (each.tensors for each in (mnist(args.data) if args.data else digits()))
    ]
    model = network(x.shape[1])
    f1 = keras.metrics.F1Score(average="macro", name="f1")
    model.compile("adam", "categorical_crossentropy", metrics=["accuracy", f1])
    distribute(model)  # 2
    model.fit(x[: args.limit], y[: args.limit], batch_size=args.batch, epochs=args.epochs, verbose=2)
    model.evaluate(*test, verbose=2)


if __name__ == "__main__":
    main()

"""A stand-in for torchvision where public MNIST scripts run offline:
scikit-learn's digits in MNIST's size.
"""

from . import datasets, transforms

__all__ = ["__version__", "datasets", "transforms"]
__version__ = "0.20.0"

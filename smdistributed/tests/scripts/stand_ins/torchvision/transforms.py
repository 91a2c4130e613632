"""The three transforms that the MNIST scripts use."""

import torch


class Compose:
    def __init__(self, parts):
        self.parts = parts

    def __call__(self, image):
        for part in self.parts:
            image = part(image)
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(image).unsqueeze(0) / 255


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean[0], std[0]

    def __call__(self, image):
        return (image - self.mean) / self.std

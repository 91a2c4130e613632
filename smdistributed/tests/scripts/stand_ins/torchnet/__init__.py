"""A stand-in for torchnet: SplitDataset."""

"""A data set cut into named parts."""

import itertools


class SplitDataset:
    def __init__(self, dataset, partitions):
        self.dataset, self.start, self.end = dataset, 0, len(dataset)
        ends = [round(part * len(dataset)) for part in itertools.accumulate(partitions.values())]
        self.parts = dict(zip(partitions, itertools.pairwise([0, *ends]), strict=True))

    def select(self, name):
        self.start, self.end = self.parts[name]

    def __len__(self):
        return self.end - self.start

    def __getitem__(self, index):
        return self.dataset[self.start + index]

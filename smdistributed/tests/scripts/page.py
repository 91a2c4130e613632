"""The example of AWS's page about scripts for smp, written anew: its imports as they are, and each
call of its example.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F  # noqa: N812
import torch.optim as optim
from torchnet.dataset import SplitDataset
from torchvision import datasets

import smdistributed.modelparallel.torch as smp


class GroupedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(28 * 28, 32)
        self.digits = nn.Linear(32, 10)

    def forward(self, images):
        pixels = torch.flatten(images.float() / 255, 1)
        return F.log_softmax(self.digits(F.relu(self.hidden(pixels))), dim=1)


@smp.step
def train_step(model, images, digits):
    output = model(images)
    loss = F.nll_loss(output, digits, reduction="mean")
    model.backward(loss)
    return output, loss


def train(model, device, loader, optimizer):
    model.train()
    for images, digits in loader:
        images, digits = images.to(device), digits.to(device)
        optimizer.zero_grad()
        _, losses = train_step(model, images, digits)
        loss = losses.reduce_mean()
        optimizer.step()
        if smp.rank() == 0:
            print(f"Loss: {loss.item():.6f}")


smp.init()
torch.cuda.set_device(smp.local_rank())
device = torch.device("cuda")

dataset = datasets.MNIST("data", train=True, download=False)
if smp.dp_size() > 1:
    parts = {f"{part}": 1 / smp.dp_size() for part in range(smp.dp_size())}
    dataset = SplitDataset(dataset, partitions=parts)
    dataset.select(f"{smp.dp_rank()}")
loader = torch.utils.data.DataLoader(dataset, batch_size=50, drop_last=True)

model = smp.DistributedModel(GroupedNet())
optimizer = smp.DistributedOptimizer(optim.Adadelta(model.parameters(), lr=1.0))
train(model, device, loader, optimizer)

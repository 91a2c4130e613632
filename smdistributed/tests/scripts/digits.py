"""Train a small convolution net with smp, as a script for GPUs does: placed by
it or by hand, saved and loaded.
"""

import argparse
import os

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn, optim
from torch.cuda.amp import autocast
from torch.optim.lr_scheduler import StepLR

import smdistributed.modelparallel.torch as smp


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.conv2 = nn.Conv2d(8, 16, 3, 1)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        return torch.flatten(F.max_pool2d(x, 2), 1)


class Classes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 32)
        self.fc2 = nn.Linear(32, 4)

    def forward(self, x):
        return F.log_softmax(self.fc2(F.relu(self.fc1(x))), 1)


class Net(nn.Module):
    def __init__(self, manual):
        super().__init__()
        if manual:
            with smp.partition(0):
                self.features = Features()
            with smp.partition(1):
                self.classes = Classes()
        else:
            self.features = Features()
            self.classes = Classes()

    def forward(self, x):
        return self.classes(self.features(x))


class Shapes(torch.utils.data.Dataset):
    """A bright quarter under noise: which one?"""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        patterns = torch.eye(4).view(4, 1, 2, 2).repeat_interleave(4, 2).repeat_interleave(4, 3)
        self.targets = torch.randint(0, 4, (count,), generator=generator)
        self.images = patterns[self.targets] + 0.2 * torch.randn(
            count, 1, 8, 8, generator=generator
        )

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index], self.targets[index]


@smp.step
def train_step(args, model, scaler, data, target):
    with autocast(args.amp > 0):
        output = model(data)
    loss = F.nll_loss(output.float(), target, reduction="mean")
    loss_to_scale = scaler.scale(loss) if args.amp else loss
    model.backward(loss_to_scale)
    return output, loss


@smp.step
def test_step(model, data, target):
    output = model(data)
    loss = F.nll_loss(output, target, reduction="sum").item()
    correct = output.argmax(dim=1, keepdim=True).eq(target.view(-1, 1)).sum().item()
    return loss, correct


def train(args, model, scaler, device, loader, optimizer):
    model.train()
    for batch, (data, target) in enumerate(loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        _, loss_mb = train_step(args, model, scaler, data, target)
        loss = loss_mb.reduce_mean()
        if args.amp:
            scaler.step(optimizer)
            scaler.update()
        elif len(list(model.local_parameters())) > 0:
            optimizer.step()
        if smp.rank() == 0 and batch % 4 == 0:
            print(f"Batch {batch} Loss: {loss.item():.6f}")


def test(model, device, loader):
    model.eval()
    loss = correct = 0
    with torch.no_grad():
        for data, target in loader:
            losses, corrects = test_step(model, data.to(device), target.to(device))
            loss += sum(losses)
            correct += sum(corrects)
    if smp.mp_rank() == 0:
        print(
            f"Test loss: {loss / len(loader.dataset):.4f}, accuracy:"
            f" {correct / len(loader.dataset):.4f}"
        )
    return loss / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=".")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--amp", type=int, default=0)
    parser.add_argument("--manual", type=int, default=0)
    parser.add_argument("--partial-checkpoint", default="")
    parser.add_argument("--full-checkpoint", default="")
    parser.add_argument("--save-partial-model", action="store_true")
    parser.add_argument("--save-full-model", action="store_true")
    parser.add_argument("--mp_parameters", default="")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise ValueError("The script requires CUDA support, but CUDA not available")
    torch.manual_seed(1)
    torch.cuda.manual_seed(1)
    if args.manual:
        smp.init({"pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0})
    else:
        smp.init()
    torch.cuda.set_device(smp.local_rank())
    device = torch.device("cuda")

    part = slice(smp.dp_rank(), None, smp.dp_size())
    train_data, test_data = Shapes(512, 1), Shapes(64, 2)
    train_data.images, train_data.targets = train_data.images[part], train_data.targets[part]
    options = {
        "batch_size": 16,
        "num_workers": 0,
        "pin_memory": True,
        "shuffle": False,
        "drop_last": True,
    }
    train_loader = torch.utils.data.DataLoader(train_data, **options)
    test_loader = torch.utils.data.DataLoader(test_data, **options)

    model = Net(args.manual)
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    model = smp.DistributedModel(model)
    scaler = smp.amp.GradScaler()
    optimizer = smp.DistributedOptimizer(optimizer)
    if args.partial_checkpoint or args.full_checkpoint:
        partial = bool(args.partial_checkpoint)
        checkpoint = smp.load(args.partial_checkpoint or args.full_checkpoint, partial=partial)
        model.load_state_dict(checkpoint["model_state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    for _ in range(args.epochs):
        train(args, model, scaler, device, train_loader, optimizer)
        test_loss = test(model, device, test_loader)
        scheduler.step()

    for is_wanted, partial in ((args.save_partial_model, True), (args.save_full_model, False)):
        if is_wanted and smp.dp_rank() == 0:
            state = {
                "model_state_dict": model.local_state_dict() if partial else model.state_dict(),
                "optimizer_state_dict": (
                    optimizer.local_state_dict() if partial else optimizer.state_dict()
                ),
            }
            smp.save(state, os.path.join(args.folder, "digits.pt"), partial=partial)
    smp.barrier()
    assert max(smp.allgather(test_loss, smp.DP_GROUP)) == min(
        smp.allgather(test_loss, smp.DP_GROUP)
    )
    smp.barrier()
    print("training finished")


if __name__ == "__main__":
    main()

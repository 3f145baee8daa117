"""A plain DistributedDataParallel script that compresses its gradients, with one more line.

torchrun --nproc-per-node 2 examples/ddp_hook.py --codec topk:0.05
python examples/ddp_hook.py --codec powersgd:2
python examples/ddp_hook.py --codec none --epochs 5
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import polyrhythm as pr
from polyrhythm.data import digits


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--codec", default="topk:0.05", help="none: plain DDP, for comparison")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--batch", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:  # from torchrun
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    place = torch.device("cpu")
    if dist.get_backend() == "nccl":
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(place)

    torch.manual_seed(0)
    train_set, test_set = digits()
    network = nn.Sequential(nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(network.to(place))
    if args.codec != "none":
        model.register_comm_hook(*pr.integrations.ddp.hook(args.codec))  # the one line

    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x.to(place)), y.to(place)).backward()
            optimizer.step()
        with torch.no_grad():
            images, labels = (tensor.to(place) for tensor in test_set.tensors)
            accuracy = (network(images).argmax(1) == labels).float().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.barrier()  # no rank leaves while another still needs it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

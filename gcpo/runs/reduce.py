"""A sum over several processes, one per GPU: the least that training by several needs (NCCL; gloo without GPUs)."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.multiprocessing


def summed(processes: int, folder: Path, numbers: int, repeats: int = 10) -> float:
    """Return the GB per second of each process that a sum of so many float32 numbers moves.

    Raises:
        RuntimeError: a process failed, or its sum is wrong.
    """
    torch.multiprocessing.spawn(_work, (processes, str(folder), numbers, repeats), processes)
    return 4 * numbers * repeats / float((folder / "seconds").read_text()) / 1e9


def _work(rank: int, processes: int, folder: str, numbers: int, repeats: int) -> None:
    cuda = torch.cuda.device_count() >= processes
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    meet, backend = f"file://{folder}/meet", "nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, init_method=meet, rank=rank, world_size=processes)
    values = torch.full((numbers,), float(rank + 1), device=device)
    torch.distributed.all_reduce(values)
    expected = processes * (processes + 1) / 2
    if not (values == expected).all():
        raise RuntimeError(f"a sum over {processes} processes is {values[0].item()}, not {expected}")
    started = time.perf_counter()
    for _ in range(repeats):
        torch.distributed.all_reduce(values)
    if cuda:
        torch.cuda.synchronize(device)
    if rank == 0:
        Path(folder, "seconds").write_text(str(time.perf_counter() - started))
    torch.distributed.destroy_process_group()

"""What tests of memory count."""

import contextlib
import gc

from torch import Tensor, nn


def live_bytes() -> int:
    """Bytes of all tensors on the CPU that Python's collector knows; memory that several share counts once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, nn.Parameter) and thing.device.type == "cpu":
            with contextlib.suppress(RuntimeError):  # stand-ins that torch.compile and vmap have left have no memory
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())

"""The backend in a worker of vLLM: it brings the worker's part of a model to a pulled version.

It writes patches if the worker holds the version to which they apply. Otherwise it loads the folder
whole, as vLLM does. The worker itself finds out which version it holds: at the start it compares
its weights with the folder that vLLM has loaded. Before it writes patches, it compares the elements
that they replace.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.v1.attention.backend import AttentionImplBase

from casnap.errors import CasnapError
from casnap.extending import Patch, Version, VersionTensor, override
from casnap.integrations.vllm.places import (
    ModelPart,
    OtherBaseError,
    Places,
    UnknownPlacesError,
    bits_of,
    learn,
    storage_of,
    targets_of,
)

_log = init_logger("vllm.casnap")
_PLAIN = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


@dataclass
class CasnapInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """vLLM's message before an update, by which a worker prepares the update.

    Attributes:
        update: The fields of the :class:`CasnapUpdateInfo` that comes next; None if it is unknown.
    """

    update: dict[str, Any] | None = None


@dataclass
class CasnapUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """vLLM's message to load a version.

    Attributes:
        folder: The real path of a folder of safetensors: one that a pull has made, or any other.
        content: The digest of its version (:attr:`casnap.Version.content`); "" for a folder that no
            pull has made.
        patches: A file with patches; "" to load the folder whole.
        digest: The BLAKE3 of the file with patches.
        base: The ``content`` of the version that the patches apply to.
        whole: Tensors that have changed, and are not in the file of patches.
    """

    folder: str
    content: str = ""
    patches: str = ""
    digest: str = ""
    base: str = ""
    whole: tuple[str, ...] | list[str] = ()


class CasnapTransferEngine(WeightTransferEngine[CasnapInitInfo, CasnapUpdateInfo]):  # type: ignore[misc]
    """Brings the weights of a worker from one version to another, in place."""

    init_info_cls = CasnapInitInfo
    update_info_cls = CasnapUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._places: Places | None = None
        # The content that this worker's weights have; "" if that is uncertain.
        self._content = ""
        # The folder that vLLM says it has loaded. Another caller may make it load another one.
        self._path = ""
        # The next update, with the writes that it needs.
        self._prepared: tuple[CasnapUpdateInfo, list[_Write]] | None = None
        self._compare()

    @property
    def _loaded_path(self) -> str:
        return str(self.vllm_config.model_config.model)

    @property
    def _held(self) -> str:
        """The ``content`` of the version that this worker holds; "" if that is unknown."""
        return self._content if self._loaded_path == self._path else ""

    def _compare(self) -> None:
        """Compare the weights with the folder that vLLM has loaded; learn where its tensors lie.

        If that fails, a warning says so, and the next version is loaded whole.
        """
        self._content, self._path, self._places = "", self._loaded_path, None
        self._is_compared = True
        try:
            self._places, self._content = self._learn()
        except Exception as e:  # noqa: BLE001 - whatever a model raises, vLLM has its weights
            _log.warning("casnap: the next version is loaded whole: %r", e)

    def _learn(self) -> tuple[Places, str]:
        """Return where the checkpoint's tensors lie in the model, and its version's ``content``.

        Raises:
            Exception: The places cannot be found out, or the model holds other weights.
        """
        version = Version.at(Path(self._path))
        if version is None:
            raise UnknownPlacesError(f"{self._path} is no folder that a pull has made")
        why = _why_derived(self.model)
        if why:
            raise UnknownPlacesError(why)
        weights = _weights(version.folder, version.record.tensors)
        padded = [
            module.weight
            for module in self.model.modules()
            if isinstance(module, VocabParallelEmbedding)
        ]
        with set_current_vllm_config(self.vllm_config):
            places = learn(self.model.load_weights, weights, self.model, padded)
        return places, version.content

    # --- called by vLLM ---

    @override
    def init_transfer_engine(self, init_info: CasnapInitInfo) -> None:
        """Prepare the next update before the engine pauses, so that the pause only has to write."""
        self._prepared = None
        if not self._is_compared:
            self._compare()
        if init_info.update is not None:
            self._prepare(self.parse_update_info(init_info.update))

    @override
    def start_weight_update(self) -> None:
        """Do nothing: weights are patched in place, or loaded in one step."""

    @override
    def finish_weight_update(self) -> None:
        """Do nothing: an update is complete once :meth:`update_weights` has returned."""

    @override
    def shutdown(self) -> None:
        """Drop the prepared update."""
        self._prepared = None

    @override
    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Bring the weights to a version; return once all are written.

        Args:
            update_info: The fields of a :class:`CasnapUpdateInfo`.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @override
    def receive_weights(self, update_info: CasnapUpdateInfo) -> None:
        """Bring the weights to a version.

        Raises:
            Exception: The version could not be loaded; the weights may be a mix now.
        """
        start = time.perf_counter()
        if update_info.content and self._held == update_info.content:
            how = "was there"
        elif update_info.patches and self._patch(update_info):
            how = "is there by patches"
        else:
            self._load(update_info)
            how = "was loaded whole"
        self._path = self.vllm_config.model_config.model = update_info.folder
        _log.info(
            "casnap: %s %s, after %.3f s",
            Path(update_info.folder).name,
            how,
            time.perf_counter() - start,
        )

    # --- loading and patching ---

    def _load(self, info: CasnapUpdateInfo) -> None:
        """Load a folder whole, as vLLM reloads one."""
        self._content = ""
        reload_weights(self.vllm_config, self.model, None, info.folder, True)
        if self._places is not None and self._places.fits(targets_of(self.model)):
            self._content = info.content
        else:
            # The weights are compared later, when the next version is prepared: the pause would be
            # too long.
            self._is_compared = False

    def _prepare(self, info: CasnapUpdateInfo) -> None:
        """Compute the writes of an update, if its patches apply to the weights of this worker."""
        if not info.patches or self._held == info.content:
            return
        try:
            self._prepared = info, self._writes(info)
        except (CasnapError, OSError) as e:
            _log.warning("casnap: %s is loaded whole: %s", Path(info.folder).name, e)

    def _patch(self, info: CasnapUpdateInfo) -> bool:
        """Write the patches of an update; return False, and write nothing, if they do not apply."""
        if self._prepared is None or self._prepared[0] != info:
            self._prepare(info)
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return False
        try:
            self._check(info)
        except CasnapError as e:
            _log.warning("casnap: %s is loaded whole: %s", Path(info.folder).name, e)
            return False
        self._content = ""
        with torch.no_grad():
            for write in prepared[1]:
                write.do()
        self._content = info.content
        return True

    def _check(self, info: CasnapUpdateInfo) -> Places:
        """Return the places of the checkpoint's tensors, if the patches of an update apply to them.

        Raises:
            CasnapError: The patches do not apply.
        """
        if self._places is None or not self._places.fits(targets_of(self.model)):
            raise UnknownPlacesError("it is not known where the weights are")
        if self._held != info.base:
            raise OtherBaseError("the patches are for another version than this worker holds")
        return self._places

    def _writes(self, info: CasnapUpdateInfo) -> list[_Write]:
        """Return the writes of an update.

        All elements that the patches replace are compared here, so that the pause only has to
        write.

        Raises:
            CasnapError: The patches do not apply to these weights.
            OSError: The patches or the folder cannot be read.
        """
        places = self._check(info)
        patches = Patch.read(Path(info.patches), info.digest, info.base, info.content)
        writes = [
            write
            for name, patch in patches.items()
            for region in places.of(name)
            if (write := _write_of(name, patch, region)) is not None
        ]
        for write in writes:
            if not write.fits():
                raise OtherBaseError(f"somebody has changed {write.name} in this worker")
        if info.whole:
            version = Version.at(Path(info.folder))
            if version is None:
                raise UnknownPlacesError(f"{info.folder} is no folder that a pull has made")
            about = {name: version.record.tensors[name] for name in info.whole}
            for name, tensor in _weights(version.folder, about).items():
                for region in places.of(name):
                    shape = region.target.shape
                    part = tensor.as_strided(shape, region.strides, region.start)
                    writes.append(_Write(name, region.target, None, None, part))
        return writes


class _Write(NamedTuple):
    """A write to the memory of a tensor: of some elements, as integers, or of all.

    The new values wait in the memory of the host, since a device has little memory left.

    Attributes:
        name: The name of the tensor in the checkpoint.
        target: The memory to write to.
        places: The indices of the elements to write; None for all.
        before: The elements expected there; None if any will do.
        values: The new elements.
    """

    name: str
    target: torch.Tensor
    places: torch.Tensor | None
    before: torch.Tensor | None
    values: torch.Tensor

    def fits(self) -> bool:
        """Whether the memory still holds the elements that this write is to replace."""
        if self.places is None or self.before is None:
            return True
        there = self.target.index_select(0, self.places.to(self.target.device))
        return torch.equal(there, self.before.to(self.target.device))

    def do(self) -> None:
        """Write the new values."""
        if self.places is None:
            self.target.copy_(self.values)
        else:
            device = self.target.device
            self.target.index_copy_(0, self.places.to(device), self.values.to(device))


def _write_of(name: str, patch: Patch, region: ModelPart) -> _Write | None:
    """Return the write that applies a patch to one part of its tensor; None if nothing changes.

    Args:
        name: The name of the tensor.
        patch: The patch.
        region: The part of the tensor, and its memory in the model.
    """
    which, places = region.located(_shared(patch.indices))
    if not len(places):
        return None
    memory = storage_of(region.target)

    def of_memory(elements: Any) -> torch.Tensor:
        # As signed integers, since torch has few functions for unsigned ones.
        signed = _shared(elements.view(f"i{elements.itemsize}"))[which]
        return bits_of(signed.view(getattr(torch, patch.dtype)).to(memory.dtype))

    return _Write(name, bits_of(memory), places, of_memory(patch.before), of_memory(patch.values))


def _shared(elements: Any) -> torch.Tensor:
    """Return a NumPy array as an aligned tensor; copy only if the array is not aligned."""
    import numpy as np

    return torch.from_numpy(np.require(elements, requirements=["A", "W"]))


def _weights(folder: Path, tensors: Mapping[str, VersionTensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a version as memory maps: the files are read when they are used.

    Args:
        folder: The folder of the version.
        tensors: The tensors, by name.
    """
    files: dict[str, mmap.mmap] = {}
    weights = {}
    for name, tensor in tensors.items():
        if tensor.file not in files:
            with (folder / tensor.file).open("rb") as file:
                files[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        dtype = getattr(torch, tensor.dtype)
        if not tensor.nbytes:
            weights[name] = torch.empty(tensor.shape, dtype=dtype)
            continue
        flat = torch.frombuffer(
            files[tensor.file],
            dtype=torch.uint8,
            count=tensor.nbytes,
            offset=tensor.start,
        )
        weights[name] = flat.view(dtype).view(tensor.shape)
    return weights


def _why_derived(model: Any) -> str:
    """Return why a model may hold data computed from its weights, such as packed ones; else "".

    Patches would not change such data.
    """
    plain = torch.nn.functional.linear
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in _PLAIN:
            return f"{name} has {type(method).__name__}, which may pack weights"
        if getattr(module, "cpu_linear", plain) is not plain:
            return f"{name} has packed its weights for this processor"
        if not hasattr(module, "process_weights_after_loading"):
            continue
        if type(module) is not Attention or (
            type(module.impl).process_weights_after_loading
            is not AttentionImplBase.process_weights_after_loading
        ):
            return f"{name} derives something of its weights"
    return ""

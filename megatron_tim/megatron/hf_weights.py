"""Hugging Face safetensors in and out of Megatron's parameters, at any layout.

Reading opens files lazily: a rank reads the tensors its own parameters are made of. Writing gives
each owner of parameters a shard file of its own and rank 0 an index: no rank holds the whole model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_tim.errors import UserError
from megatron_tim.megatron.architecture import Architecture
from megatron_tim.megatron.collective import gather_bytes, is_main, new_folder
from megatron_tim.megatron.model import unwrap
from megatron_tim.megatron.weight_map import ParameterMap, parameter_maps, shard, unshard

INDEX = "model.safetensors.index.json"


@torch.no_grad()
def load_hf_weights(chunks: list[torch.nn.Module], arch: Architecture, hf_path: Path) -> None:
    """Copies the safetensors of ``hf_path`` into the model, cast to its dtype.

    Raises:
        UserError: a tensor is missing, left over, not finite, or of another shape than config.json says, or a file is damaged.
    """
    with _Reader(Path(hf_path)) as reader:
        _refuse_surplus(reader, chunks, arch)
        for chunk in chunks:
            for entry in parameter_maps(unwrap(chunk), arch):
                group = _tensor_group(entry)
                whole = [reader.read(name) for name in entry.hf_names]
                part = shard(entry, whole, arch, dist.get_world_size(group), dist.get_rank(group))
                if part.shape != entry.parameter.shape:
                    raise UserError(
                        f"{reader.file_of(entry.hf_names[0])}: {' + '.join(entry.hf_names)} gives shape {tuple(part.shape)} where"
                        f" config.json says {tuple(entry.parameter.shape)}; the weights and config.json are of different models."
                    )
                entry.parameter.copy_(part)


def _refuse_surplus(reader: _Reader, chunks: list[torch.nn.Module], arch: Architecture) -> None:
    """Tensors that no rank's model has a place for mean another model than config.json says. Collective."""
    mine = [name for chunk in chunks for entry in parameter_maps(unwrap(chunk), arch) for name in entry.hf_names]
    known = {name for part in gather_bytes(json.dumps(mine).encode()) for name in json.loads(part)}
    if arch.tie_word_embeddings:
        known.add("lm_head.weight")  # a copy of the embedding, which some exporters write
    surplus = sorted(name for name in reader.names - known if not name.endswith(".rotary_emb.inv_freq"))
    if surplus:
        raise UserError(
            f"{reader.file_of(surplus[0])} holds {surplus[0]}{f' and {len(surplus) - 1} more tensors' if surplus[1:] else ''} that the"
            " model of its config.json has no place for; the weights and config.json are of different models."
        )


@torch.no_grad()
def hf_tensors(
    chunks: list[torch.nn.Module], arch: Architecture, of: Callable[[torch.nn.Parameter], Tensor] = lambda p: p
) -> Iterator[tuple[str, Tensor]]:
    """(HF name, whole tensor) of what this rank owns; over all ranks every name comes exactly once.

    Collective over the tensor-parallel groups. ``of`` picks what to export of a parameter, e.g. its
    gradient.
    """
    for chunk in chunks:
        for entry in parameter_maps(unwrap(chunk), arch):
            if not _has_owner_here(entry):
                continue
            group = _tensor_group(entry)
            local = of(entry.parameter).detach().contiguous()
            slices = [local]
            if entry.tensor_dim is not None and dist.get_world_size(group) > 1:
                slices = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
                dist.all_gather(slices, local, group=group)
            if dist.get_rank(group) == 0:
                yield from zip(entry.hf_names, unshard(entry, slices, arch), strict=True)


def save_hf(chunks: list[torch.nn.Module], arch: Architecture, source: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Writes a Hugging Face model folder: configuration and tokenizer of ``source``, weights of the model.

    Collective. The folder appears under its name only when complete; an existing one is replaced.

    Args:
        dtype: of the tensors written; the parameters' own when None.

    Raises:
        UserError: the folder cannot be written.
    """
    tensors = {name: _own_copy(tensor, dtype) for name, tensor in hf_tensors(chunks, arch)}
    file = f"model-rank-{dist.get_rank():05d}.safetensors"
    with new_folder(target) as partial:
        if is_main():
            _copy_side_files(source, partial)
        if tensors:
            save_file(tensors, partial / file, metadata={"format": "pt"})
        owned = gather_bytes(json.dumps({name: (file, t.numel() * t.element_size()) for name, t in tensors.items()}).encode())
        if is_main():
            _write_index({name: entry for part in owned for name, entry in json.loads(part).items()}, partial / INDEX)


def stored_dtype(hf_path: Path) -> str:
    """The dtype of the weights in ``hf_path``: 'float32' or 'bfloat16'.

    Raises:
        UserError: there are none, or of another dtype.
    """
    with _Reader(Path(hf_path)) as reader:
        path, name, dtype = reader.first()
    names = {"F32": "float32", "BF16": "bfloat16"}
    if dtype not in names:
        raise UserError(f"{path}: {name} has dtype {dtype}; supported: {', '.join(names)}.")
    return names[dtype]


class _Reader:
    """Tensors of a safetensors folder by name; files are opened once, tensors read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = sorted(folder.glob("*.safetensors"))
        if not self._files:
            raise UserError(f"model folder {folder} has no *.safetensors files; convert the weights to safetensors first.")
        self._folder, self._stack = folder, ExitStack()
        self._handles: dict[str, tuple[Path, safe_open]] = {}

    def __enter__(self) -> _Reader:
        for path in self._files:
            try:
                handle = self._stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                self._stack.close()
                raise UserError(f"{path} is damaged or not a safetensors file ({error}); download or export it again.") from None
            self._handles.update(dict.fromkeys(handle.keys(), (path, handle)))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._handles)

    def file_of(self, name: str) -> Path:
        return self._handles[name][0]

    def first(self) -> tuple[Path, str, str]:
        """File, name and safetensors dtype of one tensor."""
        name, (path, handle) = next(iter(self._handles.items()))
        return path, name, handle.get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        if name not in self._handles:
            raise UserError(f"{self._folder}: no safetensors file holds {name}; the weights do not belong to its config.json.")
        path, handle = self._handles[name]
        try:
            tensor = handle.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{path}: {name} cannot be read ({error}); download or export it again.") from None
        if not torch.isfinite(tensor).all():
            raise UserError(f"{path}: {name} holds NaN or infinite values; no model can be trained from it: export or download it again.")
        return tensor


def _tensor_group(entry: ParameterMap) -> dist.ProcessGroup:
    if entry.is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _has_owner_here(entry: ParameterMap) -> bool:
    """Whether this rank's tensor-parallel group is the one, among its replicas, that exports the parameter."""
    if entry.is_expert:
        return parallel_state.get_expert_data_parallel_rank() == 0
    return parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0


def _own_copy(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A contiguous CPU tensor with storage of its own, as safetensors requires."""
    return tensor.to(device="cpu", dtype=dtype or tensor.dtype, copy=True).contiguous()


def _copy_side_files(source: Path, target: Path) -> None:
    for path in source.iterdir():
        if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt") and path.name != INDEX:
            shutil.copy(path, target)


def _write_index(owned: dict[str, tuple[str, int]], path: Path) -> None:
    index = {
        "metadata": {"total_size": sum(size for _, size in owned.values())},
        "weight_map": {name: file for name, (file, _) in sorted(owned.items())},
    }
    path.write_text(json.dumps(index, indent=1), encoding="utf-8")

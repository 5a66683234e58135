"""Making a language model: read, packed, checked, and served through the fused forward where that is possible."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from specdec.engine.attention import ATTENTION_NAME, AttentionBackend, NewBackend, PoolOptions, ShapeProbe, attending
from specdec.engine.check import Reference, float32_copy, is_affordable
from specdec.engine.compiled import CompiledBackend, RowwiseCompiledBackend, has_kernel, lacks_kernel
from specdec.engine.decoder import Decoder, PackedRow, TransformersDecoder
from specdec.engine.errors import CacheFull, ModelRefused, where_raised
from specdec.engine.fused import FusedDecoder, has_fused_forward
from specdec.engine.graphs import CudaRecorder, Graphs
from specdec.engine.model import LanguageModel, ModelFacts
from specdec.engine.paged import PagedBackend
from specdec.engine.parallel import Group, GroupLost, check_device
from specdec.engine.pool import LayerShape
from specdec.engine.pretrained import choose_device, load_pretrained, num_embeddings
from specdec.engine.quantized import Quantization, quantize
from specdec.engine.rowwise import RowwiseSdpaBackend
from specdec.engine.sdpa import SdpaBackend
from specdec.engine.varlen import FLASH_PAGE_TOKENS

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32  # half a block is lost per sequence; growing into a new block costs some microseconds
CHECK_CACHE_BYTES = 64 << 20  # for two short prompts of a model small enough to be copied
ONE_TOKEN = PackedRow([0], [0], [0], [], ())


@dataclass(frozen=True, slots=True)
class _Options:
    """How a model that was read is to be served."""

    name: str
    kv_cache_bytes: int
    block_tokens: int
    self_check: bool
    new_backend: NewBackend
    group: Group | None = None  # of the processes that share the weights; None: this one has all of them

    @property
    def num_shares(self) -> int:
        """In how many parts the weights are."""
        return self.group.place.size if self.group else 1


def load_language_model(
    name_or_path: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    kv_cache_bytes: int,
    layers: Sequence[int] = (),
    quantization: Quantization | None = None,
    block_tokens: int | None = None,
    self_check: bool = True,
    new_backend: NewBackend | None = None,
    group: Group | None = None,
) -> LanguageModel:
    """Load a transformers causal LM by hub id or local folder.

    `device` is "auto", "cpu" or "cuda"; `dtype` is "auto", "float32" or "bfloat16" (auto: bfloat16 where the device
    computes it faster). The cache takes `kv_cache_bytes` bytes, in blocks of `block_tokens` tokens, 32 by default, on
    GPUs 256. With `layers`, only these layers are loaded; with `quantization`, weights are rounded once the model has
    passed its check: it is another model then. Unless `new_backend` says otherwise, one in int8 attends so that no
    position depends on its batch. Only safetensors weights are read, and no code that comes with a model is run. All
    processes of a `group` load at once, each its share of the weights and a cache of `kv_cache_bytes`;
    `parallel.leading` and `parallel.follow` say how they go on. Raises ModelRefused when the model cannot be loaded or
    served exactly, CacheFull when the bytes are less than one block or cannot be allocated, GroupLost when another
    process of the group ends.
    """
    chosen = choose_device(device)
    by_default = _rowwise_backend if quantization == "int8" else _backend
    block_tokens = block_tokens or _block_tokens(chosen)
    options = _Options(name_or_path, kv_cache_bytes, block_tokens, self_check, new_backend or by_default, group)
    if group is not None:
        _refuse_shared(name_or_path, layers, quantization)
        return _load_with(group, options, chosen, dtype)
    model = _load(options, chosen, dtype, layers)
    if new_backend is None and lacks_kernel(model.device, model.dtype):
        remedy = "install a C compiler, then install specdec again; until then attention is slower"
        logger.warning("attention_kernel_missing", extra={"model": name_or_path, "remedy": remedy})
    if quantization:
        quantize(model.decoder, quantization, name_or_path)
    return _recorded(model)


def serve_in_memory(
    pretrained: PreTrainedModel, *, kv_cache_bytes: int, new_backend: NewBackend | None = None
) -> LanguageModel:
    """Serve a model that is in memory, unchecked; it is taken apart, and cannot run by itself any more."""
    block_tokens, name = _block_tokens(pretrained.device), type(pretrained).__name__
    options = _Options(name, kv_cache_bytes, block_tokens, False, new_backend or _backend)
    return _recorded(_pack(pretrained, options, fused=has_fused_forward(pretrained)))


def _block_tokens(device: torch.device) -> int:
    return FLASH_PAGE_TOKENS if device.type == "cuda" else BLOCK_TOKENS


def _recorded(model: LanguageModel) -> LanguageModel:
    """Let a GPU replay what a CPU would have to call again and again; after this the model's layers must stay."""
    if model.device.type == "cuda" and isinstance(model.backend, PagedBackend):
        model.replay(Graphs(model.decoder, model.backend, CudaRecorder(), model.context_length))
    return model


def _backend(shapes: Sequence[LayerShape], options: PoolOptions) -> AttentionBackend:
    if options.device.type == "cuda":
        return PagedBackend(shapes, options)
    return CompiledBackend(shapes, options) if has_kernel(options) else SdpaBackend(shapes, options)


def _rowwise_backend(shapes: Sequence[LayerShape], options: PoolOptions) -> AttentionBackend:
    return RowwiseCompiledBackend(shapes, options) if has_kernel(options) else RowwiseSdpaBackend(shapes, options)


def _load(options: _Options, device: torch.device, dtype: str, layers: Sequence[int]) -> LanguageModel:
    """Load a model through the fused forward, or through transformers' own where that is not possible."""
    pretrained = load_pretrained(options.name, device, dtype, layers)
    if has_fused_forward(pretrained):
        try:
            return _serve(pretrained, options, fused=True)
        except CacheFull:
            raise
        except Exception as error:
            facts = {"model": options.name, "error": type(error).__name__, "where": where_raised(error)}
            logger.warning("fused_forward_refused", extra=facts)
        pretrained = load_pretrained(options.name, device, dtype, layers)  # the fused decoder took its weights
    return _serve(pretrained, options, fused=False)


def _refuse_shared(name: str, layers: Sequence[int], quantization: Quantization | None) -> None:
    if layers or quantization:
        what = "some layers alone" if layers else f"{quantization} weights"
        raise ModelRefused(f"{name} cannot be served with {what} by several processes; use one, or leave that out")


def _load_with(group: Group, options: _Options, device: torch.device, dtype: str) -> LanguageModel:
    """Load this process's share of the weights, while the others of the group load theirs. Raises GroupLost."""
    try:
        return _load_share(group, options, check_device(device, group.place), dtype)
    except RuntimeError as error:  # what torch raises where a process has ended; an EngineError is none
        raise GroupLost(f"{options.name} was not loaded by all processes that share it: {error}") from error


def _load_share(group: Group, options: _Options, device: torch.device, dtype: str) -> LanguageModel:
    """Load this process's share, compare it with the whole where that is affordable, and its cache with the others'."""
    pretrained = load_pretrained(options.name, device, dtype, num_shares=options.num_shares)
    if options.self_check and is_affordable(pretrained):
        reference = Reference(load_pretrained(options.name, device, "float32"))
        share = load_pretrained(options.name, device, "float32", num_shares=options.num_shares)
        small = replace(options, kv_cache_bytes=CHECK_CACHE_BYTES, block_tokens=BLOCK_TOKENS)
        reference.check(_pack(share, small, fused=False))
        del share
    model = _serve(pretrained, options, fused=False)
    group.check_equal(model.cache.num_blocks, "blocks in their KV caches")
    return model


def _serve(pretrained: PreTrainedModel, options: _Options, *, fused: bool) -> LanguageModel:
    """Pack the model, and compare it with its own forward, in float32 as well where a copy is affordable."""
    if not options.self_check:
        return _pack(pretrained, options, fused=fused)
    copy = float32_copy(pretrained) if options.group is None else None
    if copy is not None:
        copy_reference = Reference(copy)
        small = replace(options, kv_cache_bytes=CHECK_CACHE_BYTES, block_tokens=BLOCK_TOKENS)
        copy_reference.check(_pack(copy, small, fused=fused))
        del copy
    reference = Reference(pretrained)
    model = _pack(pretrained, options, fused=fused)
    reference.check(model)
    return model


def _pack(pretrained: PreTrainedModel, options: _Options, *, fused: bool) -> LanguageModel:
    """Replace the model's attention function and give it a cache; its own forward is lost."""
    pretrained.set_attn_implementation(ATTENTION_NAME)
    text_config = pretrained.config.get_text_config(decoder=True)
    num_token_ids, dtype, device = num_embeddings(pretrained), pretrained.dtype, pretrained.device
    decoder: Decoder = (
        FusedDecoder(pretrained) if fused else TransformersDecoder(pretrained, is_shared=options.num_shares > 1)
    )
    shapes, vocab_size = _probe(decoder, type(pretrained).__name__, text_config.num_hidden_layers)
    facts = ModelFacts(
        name=options.name,
        context_length=getattr(text_config, "max_position_embeddings", None) or 1 << 30,
        num_token_ids=num_token_ids,
        vocab_size=vocab_size,
        num_layers=len(shapes),
        hidden_size=text_config.hidden_size,
        dtype=dtype,
        device=device,
    )
    pool_options = PoolOptions(options.kv_cache_bytes, options.block_tokens, dtype, device)
    return LanguageModel(facts, decoder, options.new_backend(shapes, pool_options))


@torch.inference_mode()
def _probe(decoder: Decoder, architecture: str, num_layers: int) -> tuple[Sequence[LayerShape], int]:
    """Return what each layer stores, and the logits' width, from a forward of one token."""
    probe = ShapeProbe()
    with attending(probe):
        logits, _ = decoder(ONE_TOKEN)
    if len(probe.shapes) != num_layers:
        raise ModelRefused(
            f"{architecture} sends {len(probe.shapes)} of its {num_layers} layers through transformers' attention "
            "interface, so it cannot be served packed; choose one that uses the interface"
        )
    return probe.shapes, logits.shape[-1]

"""The engine's settings and the one function that judges them."""

import ast
import dataclasses
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from moesaic.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
LoadFormat = Literal["auto", "dummy"]
ModelImpl = Literal["auto", "native", "transformers"]
ExpertBackendName = Literal["auto", "resident", "triton"]
SchedulingPolicy = Literal["fcfs", "priority", "shortest-prefill-first"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine; flags of the command line have the same names.

    Raises: ``ConfigError`` with value, limit and remedy, before anything is allocated.
    """

    enable_chunked_prefill: bool = False
    """Split long prompts into chunks so that running streams never wait for a whole prompt."""
    prefill_chunk_size: int = 512
    """Most prompt tokens of one request in one step, in tokens, at least 1 (chunked prefill only)."""
    prefill_starvation_threshold_steps: int = 8
    """Steps a prompt that could run may be passed over before it goes first, at least 1."""
    max_partial_prefills: int = 4
    """Most prompts that may be part-way at once, at least 1 (chunked prefill only)."""
    max_tokens_per_step: int = 2048
    """Most query tokens in one step, in tokens; at least max_batch_size + block_size."""
    max_decode_stall_ms: int | None = None
    """Most milliseconds a step makes streams wait, at least 1; chunks are sized to it (chunked prefill only)."""
    max_batch_size: int = 256
    """Most requests running at once, which is the most rows in one step, at least 1."""
    scheduling_policy: SchedulingPolicy = "fcfs"
    """Who goes first: the first to come, the lower priority of the request, or the shorter prompt."""
    priority_aging_steps: int = 128
    """Steps of waiting worth one class of priority, or one full step of prompt tokens, at least 1 (not with fcfs)."""
    max_waiting_requests: int | None = None
    """Most requests that may wait for admission; more are refused. The default is no limit."""
    swap_space_bytes: int = 0
    """Host memory for the KV of preempted requests, in bytes; 0 computes it again instead."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; the default is the model's own context."""
    block_size: int = 16
    """Token positions per KV block, at least 1."""
    num_kv_blocks: int | None = None
    """KV blocks to allocate; the default is what the memory plan finds room for."""
    kv_cache_bytes: int | None = None
    """Memory for KV in bytes when num_kv_blocks is not given; the default is a share of what is free."""
    dtype: DType = "auto"
    """Type of weights, activations and KV; auto is the model's own on a GPU and float32 on a CPU."""
    device: Device = "auto"
    """Where the model runs; auto takes the GPU if there is one."""
    attention_backend: str = "auto"
    """Kernel that reads paged KV: auto, flashinfer or torch."""
    model_impl: ModelImpl = "auto"
    """Definition of the layers: Moesaic's own, with fused operations, where it has one, or transformers'."""
    expert_backend: ExpertBackendName = "auto"
    """Kernels of routed experts: fused ones for few tokens where they run, or grouped products for all."""
    cuda_graphs: bool = True
    """Capture decode steps at start-up and replay them, where model, attention and experts allow it."""
    overlap: bool = True
    """Plan and launch each step on a GPU before the tokens of the step before it have come back."""
    load_format: LoadFormat = "auto"
    """auto reads the checkpoint; dummy makes random weights from the configuration alone."""
    seed: int = 0
    """Seed of dummy weights and of requests that bring none, in [0, 2**63)."""
    batch_invariant: bool = False
    """Run tokens one by one so that outputs are equal bit for bit whatever runs beside them; slow, for reference."""
    max_consecutive_failed_steps: int = 3
    """Failed steps in a row after which the engine gives up: all requests end, no more are taken; at least 1."""
    decision_log: str | None = None
    """File for what the scheduler was told and planned, to be replayed; replaced at start. The default is none."""
    strict: bool = False
    """Refuse to start where a requested feature would fall back to another."""

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Return if every field and every rule between fields holds.

        Raises: ``ConfigError`` naming the first broken one.
        """
        check_types(self)
        for name in _AT_LEAST_ONE:
            check_at_least(name, getattr(self, name), 1)
        check_at_least("seed", self.seed, 0)
        check_at_least("swap_space_bytes", self.swap_space_bytes, 0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed is {self.seed}; it must be below 2**63; lower --seed")
        self._check_step_budget()
        if self.max_decode_stall_ms is not None and not self.enable_chunked_prefill:
            raise ConfigError(
                f"max_decode_stall_ms is {self.max_decode_stall_ms} but chunked prefill is off: a whole prompt takes "
                "as long as it takes; add --enable-chunked-prefill or leave --max-decode-stall-ms out"
            )

    def _check_step_budget(self) -> None:
        floor = self.max_batch_size + self.block_size
        if self.max_tokens_per_step < floor:
            raise ConfigError(
                f"max_tokens_per_step is {self.max_tokens_per_step} but max_batch_size + block_size is {floor}: "
                "decode rows could take a prompt's last tokens; "
                f"raise --max-tokens-per-step to {floor} or lower --max-batch-size"
            )
        spare = self.max_tokens_per_step - self.max_batch_size
        longest_wait = -(-(self.max_partial_prefills + 1) // spare) - 1
        if longest_wait > self.prefill_starvation_threshold_steps:
            raise ConfigError(
                f"max_partial_prefills is {self.max_partial_prefills}, but full decode leaves {spare} tokens a step: "
                f"a prompt could wait {longest_wait} steps, more than prefill_starvation_threshold_steps "
                f"({self.prefill_starvation_threshold_steps}); lower --max-partial-prefills or raise the threshold"
            )


_AT_LEAST_ONE = (
    "prefill_chunk_size",
    "prefill_starvation_threshold_steps",
    "max_partial_prefills",
    "max_tokens_per_step",
    "max_decode_stall_ms",
    "max_batch_size",
    "priority_aging_steps",
    "max_consecutive_failed_steps",
    "max_waiting_requests",
    "max_model_len",
    "block_size",
    "num_kv_blocks",
    "kv_cache_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigField:
    """One setting as the command line and the documentation show it."""

    name: str
    hint: Any
    """The type annotation (Any: annotations have no common type)."""
    default: Any
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable that stands for the flag."""
        return f"MOESAIC_{self.name.upper()}"

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a closed set; none otherwise."""
        choices = get_args(self.hint)
        return choices if all(isinstance(c, str) for c in choices) else ()

    @property
    def is_repeatable(self) -> bool:
        """Whether the flag may be given several times."""
        return get_origin(self.hint) is tuple


def config_fields(settings: type = EngineConfig) -> tuple[ConfigField, ...]:
    """Return every field of a settings dataclass with the docstring below it, in order."""
    hints = get_type_hints(settings)
    docs = _field_docs(settings)
    return tuple(
        ConfigField(name=f.name, hint=hints[f.name], default=f.default, help=docs[f.name])
        for f in dataclasses.fields(settings)
    )


def check_types(settings: Any) -> None:
    """Return if every field of a settings dataclass (Any) has its annotated type. Raises: ``ConfigError``."""
    for name, hint in get_type_hints(type(settings)).items():
        _check_type(name, getattr(settings, name), hint)


def _field_docs(cls: type) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, doc in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(doc, ast.Expr):
            docs[field.target.id] = ast.literal_eval(doc.value)
    return docs


def _check_type(name: str, value: Any, hint: Any) -> None:
    choices = get_args(hint)
    if choices and all(isinstance(c, str) for c in choices):
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}; choose one of {', '.join(choices)}")
        return
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"{name} is {value!r}; it must be a tuple of texts")
        return
    kinds = choices or (hint,)
    is_bool_for_int = isinstance(value, bool) and bool not in kinds
    if is_bool_for_int or not isinstance(value, kinds):
        words = " or ".join(
            {"NoneType": "nothing", "int": "an integer", "bool": "true or false"}.get(k.__name__, k.__name__)
            for k in kinds
        )
        raise ConfigError(f"{name} is {value!r}; it must be {words}")


def check_at_least(name: str, value: float | None, low: float) -> None:
    """Return if ``value`` is None or at least ``low``. Raises: ``ConfigError`` naming the flag."""
    if value is not None and value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}; raise --{name.replace('_', '-')}")

"""GCPOConfig: TRL's GRPOConfig and the settings of a method."""

import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.utils import parse_flag_from_env
from transformers.integrations import is_deepspeed_zero3_enabled
from trl import GRPOConfig

from gcpo.methods import BASES, Method, get_method
from gcpo.methods.forms import check_alpha
from gcpo.methods.own import Weight, called
from gcpo.methods.reward import OverlongPenalty
from gcpo.methods.token import CovarianceClip, CovariancePenalty

Range = tuple[float, float]
if TYPE_CHECKING:
    Named = str | Method | Weight
else:
    Named = str  # what a parser of command lines reads

# TRL's own, for settings that are None here until the method has spoken.
_TRL_DEFAULTS = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "epsilon": 0.2}


def _as_in_trl() -> Any:
    return field(default=None, metadata={"help": "As in TRL; None: the method's own."})


@dataclass
class GCPOConfig(GRPOConfig):
    """TRL's GRPOConfig and the settings of the method.

    ``loss_type``, ``scale_rewards``, ``epsilon``, ``epsilon_high`` and the schedule of the reference model default to
    None: the method's own ("grpo" and "group" for most, the objective of GCPO's Eq. 1). TRL's default loss, "dapo",
    averages over tokens; set it to have it.

    Args:
        method: a name in :data:`gcpo.methods.METHODS`, or a weight of one's own: a function of
            :class:`gcpo.rollouts.Rollouts`, a `Method`, or the place of one, "package.module:name"
            (:func:`gcpo.methods.get_method`).
        method_options: constants of the method, such as ``{"form": "linear"}`` (see ``gcpo.methods``). Of group
            weights: ``alpha_geo`` and ``alpha_rd`` in place of alpha for one of GCPO's factors, ``alpha_norm`` "log_g"
            or "none" (alpha as it is), ``clusters`` "greedy", "bidirectional", "exact", "math" or "task".
        alpha: alpha_base of group weights; the strength is alpha / log G (GCPO, section 3.4). None: the method's own
            (0.6 for GCPO's). 0 gives the base method.
        alpha_end: alpha_base of the last step, to which ``alpha`` goes by equal parts a step; None: it stays.
        drop_equal_groups: groups whose rewards are all equal, which teach nothing, leave the loss: its count of tokens,
            or, where it is a mean over responses ("grpo", "dr_grpo"), that mean. The KL term stays a mean over all.
        equalize_mean: divide the weights by their mean over the batch, for comparisons at nearly the same mean |A| (a
            weight that depends on A itself leaves a rest, notebook 35).
        reward_range: lowest and highest possible (weighted, summed) reward, two numbers; normalises RD (GCPO, Eq. 11).
            None: what the reward functions declare as their attribute ``reward_range`` (TRL's own are known); a method
            that measures rewards refuses to start where one declares none.
        correctness_reward: name of the reward function that says right or wrong, for methods that ask (egpo, care);
            needed where there are several.
        correctness_range: lowest and highest value of that function; None: what it declares, else ``reward_range``.
            Above the middle is right.
        embedding_model: a sentence-transformers path or Hub name; loaded only for methods that read embeddings.
        entailment_model: a sequence classification path or Hub name; loaded only for methods that read clusters or NLI.
        entailment_threshold: a response joins a greedy cluster at this entailment probability or above (GCPO, App.
            E.3).
        use_full_completion_for_clustering: embed and cluster the whole completion instead of the extracted answer,
            as GCPO does for mathematics.
        share_prompts: compute each distinct prompt of a micro-batch once, for all rows that begin with it
            (:mod:`gcpo.trainer.prefix`), and put rows of one prompt into one micro-batch: loss, gradients and weights
            are the same up to rounding (``entropy``, ``kl`` and clip ratios are logged as means over micro-batches),
            several times faster where prompts are long and passes wait for arithmetic. None: where a small batch has
            the same numbers, else with a warning that says why not; False: TRL's own pass, bit for bit.
        resolved: the method itself, of a caller who has it; it goes before its name, options and alpha.

    Raises:
        ValueError: unknown method or option (with the nearest valid name), a setting outside its range, or TRL settings
            that the method cannot work with.
    """

    method: Named = field(default="gcpo_bot", metadata={"help": "A name in METHODS, or module:name."})
    method_options: dict[str, Any] | str | None = field(default=None, metadata={"help": "Constants of the method."})
    alpha: float | None = field(default=None, metadata={"help": "alpha_base; strength is alpha / log G."})
    alpha_end: float | None = field(default=None, metadata={"help": "alpha_base of the last step."})
    drop_equal_groups: bool = field(default=False, metadata={"help": "Groups with equal rewards leave the loss."})
    equalize_mean: bool = field(default=False, metadata={"help": "Divide weights by their batch mean."})
    # Types that HfArgumentParser can read from a command line.
    reward_range: list[float] | None = field(default=None, metadata={"help": "Lowest and highest reward."})
    correctness_reward: str | None = field(default=None, metadata={"help": "The reward function that says right."})
    correctness_range: list[float] | None = field(default=None, metadata={"help": "Its lowest and highest."})
    embedding_model: str = field(default="all-MiniLM-L6-v2", metadata={"help": "Path or Hub name."})
    entailment_model: str = field(default="FacebookAI/roberta-large-mnli", metadata={"help": "Path or Hub name."})
    entailment_threshold: float = field(default=0.35, metadata={"help": "Entailment probability to join a cluster."})
    use_full_completion_for_clustering: bool = field(default=False, metadata={"help": "True for mathematics."})
    share_prompts: bool | None = field(default=None, metadata={"help": "Compute a batch's distinct prompts once."})
    loss_type: str | None = _as_in_trl()  # type: ignore[assignment]
    scale_rewards: str | None = _as_in_trl()  # type: ignore[assignment]
    epsilon: float = _as_in_trl()
    ref_model_mixup_alpha: float | None = _as_in_trl()  # type: ignore[assignment]
    ref_model_sync_steps: int | None = _as_in_trl()  # type: ignore[assignment]

    resolved: InitVar[Method | None] = None

    def __post_init__(self, resolved: Method | None) -> None:
        row = resolved or self._row()
        self.method = called(self.method)  # which can be written down
        if self.alpha_end is not None:
            check_alpha(self.alpha_end, "alpha_end")
        for name in ("alpha", "alpha_end"):
            if (value := getattr(self, name)) is not None and not any(one.has_alpha for one in row.components):
                warnings.warn(f"{self.method} has no alpha: {name}={value} changes nothing.", stacklevel=3)
        for name in ("reward_range", "correctness_range"):
            if (limits := getattr(self, name)) is not None:
                setattr(self, name, as_range(name, limits))
        for name, value in {**_TRL_DEFAULTS, **BASES[row.base], **row.trl}.items():
            if getattr(self, name) == getattr(GCPOConfig, name):  # the default: None, or TRL's own
                setattr(self, name, value)
        super().__post_init__()
        self._method = resolved or self._clipped(row)
        if (conflict := next(self._conflicts(row), None)) is not None:
            raise ValueError(f"{self.method} {conflict}")
        if self.on_policy and row.needs_off_policy_steps:
            warnings.warn(
                f"{self.method}: every ratio pi / pi_old is 1 with these settings, so that it equals GRPO. Set "
                "num_iterations=2, or steps_per_generation above gradient_accumulation_steps.",
                stacklevel=3,  # where the settings are written
            )

    def resolved_method(self) -> Method:
        """The method with its constants, its alpha and, for a method that asks, the loss's own clip of the ratio."""
        if "_method" not in vars(self):
            self._method = self._clipped(self._row())
        return self._method

    def _row(self) -> Method:
        return get_method(self.method, alpha=self.alpha, seed=self.seed, **_options(self.method_options))

    def _clipped(self, row: Method) -> Method:
        return row if "clip" in _options(self.method_options) else row.clipped(self.epsilon, self.epsilon_high)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the method out of a saved file, where it is found by its name again: a function may have no place."""
        return {key: value for key, value in vars(self).items() if key != "_method"}

    @property
    def on_policy(self) -> bool:
        """Return True if every optimiser step uses completions of the policy it updates, so that all ratios are 1."""
        steps = (self.steps_per_generation or 1) * self.num_iterations  # of a generation; TRL has set the first factor
        return self.gradient_accumulation_steps % steps == 0

    @property
    def compares_rows(self) -> bool:
        """Return True if what a row adds to a step depends on the other rows of its micro-batch."""
        entropies = any(getattr(self, name, 0) for name in ("entropy_coef", "use_adaptive_entropy"))  # since TRL 1.16
        return self.resolved_method().in_loss or self.loss_type == "bnpo" or self.top_entropy_quantile != 1 or entropies

    @property
    def shards(self) -> bool:
        """Return True if processes share out the parameters of models (FSDP or ZeRO-3)."""
        return bool(self.fsdp) or parse_flag_from_env("ACCELERATE_USE_FSDP") or is_deepspeed_zero3_enabled()

    def _conflicts(self, row: Method) -> Iterator[str]:
        """Yield what the method cannot work with, and the way out: most would pass for another method's result."""
        by_token = "token" in {factor.granularity for factor in row.factors}
        compares_tokens = any(isinstance(one, CovarianceClip | CovariancePenalty) for one in row.components)
        overlong = isinstance(row.reward, OverlongPenalty)
        if not 0 <= self.entailment_threshold <= 1:
            yield f"clusters by entailment_threshold={self.entailment_threshold}: give a probability."
        if row.permuted and self.generation_batch_size == self.num_generations:
            yield "permutes weights across groups, and a generation holds one: raise per_device_train_batch_size."
        if compares_tokens and self.per_device_train_batch_size * self.world_size == 1:
            yield "compares tokens of several rows, and a micro-batch holds one: raise per_device_train_batch_size."
        if self.sync_ref_model and self.shards:
            yield "moves a reference (sync_ref_model) that checkpoints keep whole: train without FSDP and ZeRO-3."
        if "ref_logps" in row.reads and self.beta == 0:
            yield "reads a reference model, which TRL keeps for a KL term alone: set beta above 0, to 1e-6 or more."
        if by_token and self.importance_sampling_level != "token":
            yield 'weighs tokens, and a ratio per sequence would spread weights: set importance_sampling_level="token".'
        if row.reward is not None and self.multi_objective_aggregation != "sum_then_normalize":
            yield 'changes the sum of rewards: set multi_objective_aggregation="sum_then_normalize".'
        if overlong and (self.max_completion_length is None or self.mask_truncated_completions):
            yield "penalises long responses: set max_completion_length, and leave mask_truncated_completions False."


def as_range(name: str, limits: Any) -> Range:
    """Return two numbers, of which the first is the lower one."""
    match limits:
        case [int() | float() as low, int() | float() as high] if -math.inf < low < high < math.inf:
            return float(low), float(high)
    raise ValueError(f"{name} must be (low, high), two numbers with low < high, got {limits!r}.")


def _options(given: Any) -> dict[str, Any]:
    """Return a method's options, which a command line gives as JSON."""
    try:
        return dict(json.loads(given) if isinstance(given, str) else given or {})
    except (ValueError, TypeError) as error:
        raise ValueError(f'method_options is {given!r}: give a mapping or JSON, as {{"form": "linear"}}.') from error

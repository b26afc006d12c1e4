"""Backend of lm-evaluation-harness, which scores and generates with a model of the engine.

Importing this module registers the backend as ``interposer``. It needs lm_eval, which the extra
``interposer-engine[eval]`` installs. Most users call ``interposer eval``; Python programs pass
``InterposerLM`` to ``lm_eval.simple_evaluate``.

The results equal those of lm_eval's backend ``hf``: same tokens, same truncation, same windows.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from interposer import explain
from interposer.errors import ConfigError, RequestError, UnknownNameError
from interposer_engine._distributed.launcher import launched
from interposer_engine._language_model import Completion, LanguageModel, Stream
from interposer_engine._loader import load
from interposer_engine._sampling import non_finite
from interposer_engine._sampling_params import SamplingParams
from interposer_ops.layers import MOST_LIKELY
from interposer_tools.options import policy

try:
    import jinja2
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import (
        handle_stop_sequences,
        has_bos_prefix,
        normalize_gen_kwargs,
        postprocess_generated_text,
    )
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(
        f"An evaluation needs lm_eval: {error}. Try: pip install 'interposer-engine[eval]'"
    ) from error

__all__ = ["NAME", "InterposerLM"]

NAME = "interposer"
"""Name of the backend, for ``lm_eval --model``."""

_LOGGER = logging.getLogger(__name__)
_MOST_ROWS = 64  # rows of logits that are normalized at once
_SAMPLING = ("min_p", "repetition_penalty", "temperature", "top_k", "top_p")
_KERNELS = ("attention", "kernel", "scheme")  # kinds of choices that change numbers
# Settings of lm_eval's tasks with the values that have no effect here.
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {"do_sample": (True, False), "num_beams": (1,)}

Scored = tuple[float, bool]
"""The log probability of a continuation, and whether greedy decoding would generate it."""
_Key = TypeVar("_Key")
_Pair = tuple[Any, list[int], list[int]]
"""Key in the cache of answers, tokens of the context, and tokens of the continuation."""


class InterposerLM(TemplateLM):  # type: ignore[misc]
    """Scores and generates the requests of lm_eval's tasks with a language model.

    All requests of a task run as one continuous batch, so lm_eval's batch size has no effect.
    """

    def __init__(
        self,
        path: str | Path | LanguageModel | None = None,
        *,
        pretrained: str | Path | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        seed: int = 1234,
        adapter: str | None = None,
        platform: str | None = None,
        kernel: str | Sequence[str] = (),
        locked: bool = False,
        tensor_parallel: int = 1,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        """Load a model.

        Args:
            path: Path or name of a model as for ``load``, or a loaded model.
            pretrained: The same as ``path``, by the name of the backend ``hf``.
            max_length: Longest input of the model in tokens; by default, its context.
            max_gen_toks: Limit of new tokens for tasks that set no limit.
            add_bos_token: Whether texts start with the BOS token; None leaves this to the
                tokenizer.
            prefix_token_id: Token that stands for an empty context; by default, the BOS token,
                or the EOS token if there is none.
            chat_template_args: Variables of the chat template.
            enable_thinking: Variable of the chat template; needs ``think_end_token``.
            think_end_token: Text that ends the reasoning, which is removed from answers.
            seed: Seed of the first sampled answer of a task; answer i uses this number plus i.
            adapter: LoRA adapter, as a path or as a name on the hub.
            platform: Rules for the platform, as for the option ``--platform``.
            kernel: Rules for kernels, as for the option ``--kernel``: ``"OP=NAME"``.
            locked: Whether to refuse plugins that are not in the lock file.
            tensor_parallel: Number of processes that share the model.
            batch_size: Ignored, as is ``max_batch_size``: ``max_sequences`` limits the batch.
            device: Ignored, as lm_eval always names one: ``platform`` selects the device.
            **options: Arguments of ``load``, such as ``dtype`` and ``quantization``.
        Raises: ConfigError: there is no path, a setting is unusable, or ``load`` refuses it.
        """
        super().__init__()
        if (path is None) == (pretrained is None):
            raise ConfigError("Exactly one of path and pretrained must name the model")
        if enable_thinking and think_end_token is None:
            raise ConfigError(
                "enable_thinking needs the text that ends the reasoning. "
                "Try: think_end_token='</think>'"
            )
        self._closing = ExitStack()
        # lm_eval never closes a backend; this also runs when the interpreter exits.
        weakref.finalize(self, self._closing.close)
        if isinstance(path, LanguageModel):
            policy_options = {"platform": platform, "kernel": kernel, "locked": locked}
            chosen = {**options, **{name: value for name, value in policy_options.items() if value}}
            if tensor_parallel != 1:
                chosen["tensor_parallel"] = tensor_parallel
            if chosen:
                raise ConfigError(
                    f"{min(chosen)} is set when a model is loaded, but this one is loaded already. "
                    "Try: set it in load(...)"
                )
            self._lm = path
        else:
            _check_options(options)
            rules = [kernel] if isinstance(kernel, str) else kernel
            config = policy(rules, platform, locked)
            load_model = self._closing.enter_context(launched(tensor_parallel, config))
            self._lm = load_model(path or pretrained, config=config, **options)
            self._closing.callback(self._lm.close)
        if adapter is not None and adapter not in self._lm.adapters:
            self._lm.load_adapter(adapter, adapter)
        self._adapter = adapter
        self._options = options
        self._context: int = self._lm.engine.model.config.max_position_embeddings
        self._max_length = self._context if max_length is None else max_length
        if not 1 <= self._max_length <= self._context:
            raise ConfigError(
                f"max_length is {max_length}, must be from 1 to {self._context}, the context of "
                f"{self._lm.path}"
            )
        runner = self._lm.engine.runner
        if runner.encoder_inputs is not None:
            self.backend = "seq2seq"
        # The engine reports no log probabilities of tokens that an encoder or a prefix-LM reads.
        self._predicts_prompts = runner.encoder_inputs is None and not runner.is_prefix_lm
        self.tokenizer = self._lm.tokenizer.transformers_tokenizer
        self._max_gen_toks = max_gen_toks
        self._add_bos_token = add_bos_token
        self._prefix_token_id = prefix_token_id
        self._think_end_token = think_end_token
        self._seed = seed
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking

    @property
    def language_model(self) -> LanguageModel:
        """The evaluated model."""
        return self._lm

    def close(self) -> None:
        """Free a model that this backend loaded, and end its other processes."""
        self._closing.close()

    @property
    def eot_token_id(self) -> int | None:
        """Id of the tokenizer's EOS token."""
        return self._special_token("eos_token_id")

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that stands for an empty context.

        Raises: ConfigError: the tokenizer has neither a BOS nor an EOS token.
        """
        candidates = self._prefix_token_id, self._special_token("bos_token_id"), self.eot_token_id
        for token_id in candidates:
            if token_id is not None:
                return token_id
        raise ConfigError(
            f"The tokenizer of {self._lm.path} has no BOS and no EOS token to precede a text. "
            "Try: the model argument prefix_token_id"
        )

    def _special_token(self, name: str) -> int | None:
        token_id: int | None = getattr(self.tokenizer, name)
        return token_id

    @property
    def max_length(self) -> int:
        """Longest input of the model in tokens."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Limit of new tokens for tasks that set no limit."""
        return self._max_gen_toks

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, by which lm_eval caches the requests of a task."""
        return str(self._lm.path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return the facts on the model that lm_eval writes to its results."""
        rows = explain(self._lm).rows
        requests = ((row.choice.request, row.choice.chosen.name) for row in rows)
        kernels = {f"{each.name}: {name}" for each, name in requests if each.kind in _KERNELS}
        return {
            "model_dtype": str(self._lm._dtype).removeprefix("torch."),
            "model_quantization": self._options.get("quantization"),
            "model_device": self._lm.placement.device.name,
            "model_kernels": sorted(kernels),
        }

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text.

        Args:
            add_special_tokens: Whether the tokenizer adds special tokens. None leaves this to
                ``add_bos_token``, except that a text never gets a second BOS token.
        """
        special = self._add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and self._starts_with_bos(string):
            special = False
        adds = {} if special is None else {"add_special_tokens": special}
        # Texts may exceed the context, which transformers would warn of.
        tokens: list[int] = self.tokenizer.encode(string, verbose=False, **adds)
        bos = self.tokenizer.bos_token_id
        # Some tokenizers add no BOS token by default.
        if add_special_tokens is None and special and bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return tokens

    def _starts_with_bos(self, string: str) -> bool:
        return bool(has_bos_prefix(string, self.tokenizer.decode([self.prefix_token_id])))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as a prompt, without system messages if the template refuses them."""

        def rendered(messages: list[dict[str, str]]) -> str:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_args,
            )
            return text

        try:
            return rendered(chat_history)
        except jinja2.TemplateError as error:
            _LOGGER.warning("The chat template refuses the system message: %s", error)
            return rendered([each for each in chat_history if each["role"] != "system"])

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each text.

        A text that is longer than ``max_length`` is split into windows that predict each token
        once; the last window starts earlier, so that it is full too.
        """
        pairs: list[_Pair] = []
        owners: list[int] = []
        texts = [str(request.args[0]) for request in requests]
        for index, text in enumerate(texts):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self._max_length, context_len=1
            )
            for window in windows:
                pairs.append((None, *make_disjoint_window(window)))
                owners.append(index)
        totals = [0.0] * len(texts)
        scores = self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)
        for index, (logprob, _) in zip(owners, scores, strict=True):
            totals[index] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[_Pair], disable_tqdm: bool = False, **_: Any
    ) -> list[Scored]:
        """Return the score of each continuation.

        Raises: RequestError: a context or continuation is empty, or a continuation is longer
            than ``max_length``.
        """
        for key, context, continuation in requests:
            if not context or not 1 <= len(continuation) <= self._max_length:
                raise RequestError(
                    f"A continuation of {len(continuation)} tokens after {len(context)} cannot be "
                    f"scored with max_length {self._max_length}: {key!r:.200}"
                )
        scores: dict[int, Scored] = {}
        with tqdm(total=len(requests), desc="loglikelihood", disable=disable_tqdm) as bar:

            def record(index: int, score: Scored) -> None:
                scores[index] = score
                if (key := requests[index][0]) is not None:
                    self.cache_hook.add_partial("loglikelihood", key, score)
                bar.update()

            if self._predicts_prompts:
                self._score_single_tokens(requests, record)
                self._score_prompts(requests, scores.keys(), record)
            for index, (_key, context, continuation) in enumerate(requests):
                if index not in scores:
                    record(index, self._score_by_logits(context, continuation))
        return [scores[index] for index in range(len(requests))]

    def _window(self, context: Sequence[int], continuation: Sequence[int]) -> list[int]:
        """Return context and continuation, truncated on the left to ``max_length`` inputs.

        The last token is predicted, and no input.
        """
        return [*context, *continuation][-(self._max_length + 1) :]

    def _score_single_tokens(
        self, requests: Sequence[_Pair], record: Callable[[int, Scored], None]
    ) -> None:
        """Score continuations of one token after the same context by one step.

        Answers of multiple-choice tasks are often single letters. A continuation that is not
        among the likeliest tokens is left out.
        """
        indices_by_context = defaultdict[tuple[int, ...], list[int]](list)
        for index, (_, tokens, continuation) in enumerate(requests):
            prompt = self._window(tokens, continuation)[:-1]
            if len(continuation) == 1 and len(prompt) < self._context:
                indices_by_context[tuple(prompt)].append(index)
        groups = {prompt: group for prompt, group in indices_by_context.items() if len(group) > 1}
        params = SamplingParams(max_new_tokens=1, top_logprobs=MOST_LIKELY, adapter=self._adapter)
        for context, completion in self._completions((each, each, params) for each in groups):
            logprobs = dict(completion.top_logprobs[0])
            for index in groups[context]:
                (token,) = requests[index][2]
                if token in logprobs:
                    record(index, (logprobs[token], token == completion.token_ids[0]))

    def _score_prompts(
        self,
        requests: Sequence[_Pair],
        scored: Iterable[int],
        record: Callable[[int, Scored], None],
    ) -> None:
        """Score continuations as ends of prompts, except those that fill the model's context."""
        scored_indices = set(scored)
        windows = {
            index: self._window(context, continuation)
            for index, (_, context, continuation) in enumerate(requests)
            if index not in scored_indices
        }
        # A prompt leaves space for one new token.
        fitting = [index for index, window in windows.items() if len(window) < self._context]
        # The longest first, so that a lack of memory shows at once.
        fitting.sort(key=lambda index: (-len(windows[index]), windows[index]))
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=0, adapter=self._adapter)
        for index, completion in self._completions((i, windows[i], params) for i in fitting):
            records = completion.prompt_logprobs[-len(requests[index][2]) :]
            logprob = sum(each.logprob for each in records)
            if logprob != logprob:
                raise non_finite(f"The logits of {requests[index][0]!r:.100}")
            record(index, (logprob, all(each.rank == 1 for each in records)))

    def _score_by_logits(self, context: list[int], continuation: list[int]) -> Scored:
        """Score one continuation by the logits of all inputs."""
        if self.backend == "seq2seq":
            start = self._lm.engine.start_token_ids[0]
            inputs, source = [start, *continuation[:-1]], context[-self._max_length :]
            logits = self._lm.logits(inputs, adapter=self._adapter, source=source)
        else:
            inputs = self._window(context, continuation)[:-1]
            num_prompt = len(inputs) + 1 - len(continuation)
            logits = self._lm.logits(inputs, adapter=self._adapter, num_prompt=num_prompt)
        logits = logits[-len(continuation) :]
        targets = torch.tensor(continuation, device=logits.device)
        total, is_greedy = 0.0, True
        for rows, tokens in zip(logits.split(_MOST_ROWS), targets.split(_MOST_ROWS), strict=True):
            chosen = rows.log_softmax(-1).gather(1, tokens[:, None])
            total += float(chosen.sum(dtype=torch.float64))
            is_greedy = is_greedy and bool((rows.argmax(-1) == tokens).all())
        if total != total:
            raise non_finite("The logits of a continuation")
        return total, is_greedy

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each context, up to the first stop text.

        A context is truncated on the left, so that ``max_length`` includes the new tokens.

        Raises: RequestError: a task sets an unknown parameter, or leaves no tokens for a context.
        """
        answers: dict[int, str] = {}
        stops: dict[int, list[str]] = {}
        jobs: list[tuple[int, list[int], SamplingParams]] = []
        for index, request in enumerate(requests):
            context, settings = request.args
            params, stops[index] = self._sampling(settings, self._seed + index)
            jobs.append((index, self._prompt(context, params.max_new_tokens), params))
        jobs.sort(key=lambda job: (-len(job[1]), job[1]))
        with tqdm(total=len(jobs), desc="generate_until", disable=disable_tqdm) as bar:
            for index, completion in self._completions(jobs):
                answers[index] = postprocess_generated_text(
                    completion.text, stops[index], self._think_end_token
                )
                self.cache_hook.add_partial("generate_until", requests[index].args, answers[index])
                bar.update()
        return [answers[index] for index in range(len(requests))]

    def _prompt(self, context: str, max_new_tokens: int) -> list[int]:
        """Return the tokens of a context, as many as leave space for the new tokens."""
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        if self.backend == "seq2seq":
            return tokens[-self._max_length :]
        max_prompt_tokens = self._max_length - max_new_tokens
        if max_prompt_tokens < 1:
            raise RequestError(
                f"{max_new_tokens} new tokens leave no space for a context within max_length "
                f"{self._max_length}. Try: --gen_kwargs max_gen_toks={self._max_length // 2}"
            )
        return tokens[-max_prompt_tokens:]

    def _sampling(self, settings: Mapping[str, Any], seed: int) -> tuple[SamplingParams, list[str]]:
        """Return the sampling parameters of a request, and its stop texts.

        Parameters that the checkpoint suggests apply, as they do in transformers.

        Raises: RequestError: a setting is unknown.
        """
        task_settings: dict[str, Any] = normalize_gen_kwargs(dict(settings), self._max_gen_toks)
        eos = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        stop = [text for text in handle_stop_sequences(task_settings.pop("until"), eos) if text]
        max_new_tokens = task_settings.pop("max_gen_toks")
        sampling_settings = {
            name: task_settings.pop(name)
            for name in _SAMPLING
            if task_settings.get(name) is not None
        }
        # A task without a temperature is greedy, whatever the checkpoint suggests.
        temperature = float(sampling_settings.pop("temperature", 0.0))
        for name, value in task_settings.items():
            if value not in _WITHOUT_EFFECT.get(name, (None,)):
                raise RequestError(
                    f"The generation setting {name} is {value!r:.100}, which has no equivalent "
                    f"here. Try: leave it out, or use {', '.join(_SAMPLING)}"
                )
        params = {**self._lm.suggested, **sampling_settings, "temperature": temperature}
        return SamplingParams(
            **params,
            max_new_tokens=max_new_tokens,
            stop=tuple(stop),
            seed=seed,
            adapter=self._adapter,
        ), stop

    def _completions(
        self, jobs: Iterable[tuple[_Key, Sequence[int], SamplingParams]]
    ) -> Iterator[tuple[_Key, Completion]]:
        """Yield the completion of each job as it ends, with the key of the job.

        Twice as many requests as can run are queued, so that each step is full, and the others
        take no memory.
        """
        lm, waiting = self._lm, iter(jobs)
        most_streams = 2 * lm.engine.runner.max_sequences
        streams: list[tuple[_Key, Stream]] = []
        try:
            while True:
                while len(streams) < most_streams and (job := next(waiting, None)) is not None:
                    key, prompt, params = job
                    streams.append((key, lm.start(list(prompt), params)))
                if not streams:
                    return
                with lm.engine.lock:
                    lm.engine.step()
                    for _, stream in streams:
                        while stream.num_unread and not stream.ended:
                            stream.read()
                        if stream.ended:
                            lm.engine.cancel(stream.sequence)  # it may run after a stop text
                ended = [pair for pair in streams if pair[1].ended]
                streams = [pair for pair in streams if not pair[1].ended]
                yield from ((key, stream.completion()) for key, stream in ended)
        finally:
            with lm.engine.lock:
                for _, stream in streams:
                    lm.engine.cancel(stream.sequence)


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise UnknownNameError for a model argument that ``load`` does not have."""
    load_options = inspect.signature(load).parameters.keys() - {
        "path",
        "platform",
        "tensor_parallel",
    }
    backend_options = inspect.signature(InterposerLM).parameters.keys() - {"options"}
    for name in options:
        if name not in load_options:
            raise UnknownNameError("model argument", name, load_options | backend_options)


# lm_eval registers the backend itself once it reads entry points. Its own backends are registered
# by the import of ``lm_eval.models`` above; it would not register them later.
if NAME not in model_registry:
    model_registry.register(NAME, target=InterposerLM)

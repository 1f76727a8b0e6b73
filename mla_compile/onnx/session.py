"""Run an exported model directory: read tokens and return logits. Caches stay on the device between calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mla_compile.errors import InputError, ModelFileError, OptionError
from mla_compile.onnx import engine
from mla_compile.onnx.engine import Decision, Provider
from mla_compile.onnx.files import check_files
from mla_compile.onnx.manifest import TOKENS, Manifest, check_onnxruntime
from mla_compile.onnx.profile import PROFILES, RUN_HERE
from mla_compile.onnx.prompts import check_prompts
from mla_compile.onnx.state import State, to_float32, view

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, SessionOptions

_TYPES = {"float32": "tensor(float)", "float16": "tensor(float16)", "bfloat16": "tensor(bfloat16)"}


class Session:
    """A loaded model directory of profile ``portable`` or ``inplace``.

    Args:
        directory: a directory that ``mla-compile export`` wrote.
        providers: execution providers of ONNX Runtime, as names or (name, options). The default is CUDA, if it starts,
            and CPU.
        library: a native library for the attention nodes. ``"auto"`` looks for a usable library, a path requires that
            file, and ``None`` uses none. :attr:`decision` says what was decided.
        session_options: ``onnxruntime.SessionOptions``. Use them for one Session only, because a library is registered
            in them.
        verify_files: whether to compare the SHA-256 of every file. Sizes and external data are always checked.
        load_prefill: whether to load the graph for prompts, if there is one. If it is not loaded, the decode graph
            reads prompts. This takes longer, but the weights are loaded only once.
        prefill_chunk: the number of prompt tokens per call. ``None`` reads a prompt in one call. In one call, an
            attention has H x chunk x T scores per prompt.

    Raises :class:`ModelFileError` if files, onnxruntime, its providers or a named library cannot be used, and
    :class:`OptionError` for an invalid value.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        providers: Sequence[Provider] | None = None,
        library: str | Path | None = "auto",
        session_options: SessionOptions | None = None,
        verify_files: bool = True,
        load_prefill: bool = True,
        prefill_chunk: int | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise OptionError(f"prefill_chunk is {prefill_chunk}, expected at least 1, or None for the whole prompt")
        self.directory = Path(directory)
        self.manifest = Manifest.read(self.directory)
        self._profile = PROFILES[self.manifest.profile]
        if self._profile.runner:
            raise ModelFileError(
                f"{directory} is of profile {self._profile.name!r}, expected {RUN_HERE}; {self._profile.runner}"
            )
        self._ort = engine.onnxruntime()
        check_onnxruntime(self.manifest, self._ort.__version__)
        check_files(self.directory, self.manifest, quick=not verify_files)

        asked = engine.choose(self._ort, providers)
        started = engine.working(self._ort, asked, required=providers is not None)
        self.providers = tuple(name for name, _ in started)
        self.device = engine.device_of(started)
        self.decision: Decision = engine.decide(
            self.manifest, self.providers, self.device, self._ort.__version__, library
        )
        options = engine.options_with(self._ort, session_options, self.decision)
        self._graphs = {
            name: self._open(file, options, started)
            for name, file in self.manifest.graphs.items()
            if name == "decode" or (name == "prefill" and load_prefill)
        }
        one = self.manifest.decode_query if "prefill" not in self._graphs else None
        self._chunk = one if one is not None else prefill_chunk

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, capacity: int | None = None
    ) -> tuple[State, npt.NDArray[np.float32]]:
        """Read prompts. Return a new state, and the logits of each prompt's next token, float32 [batch, vocab].

        Shorter prompts are padded on the left. ``capacity``: the number of tokens that the state will hold, including
        padding. Caches written in place are allocated for this number of tokens. A longer state requires copying them.
        Raises :class:`InputError` for prompts that the model cannot read.
        """
        check_prompts(self.manifest, prompts)
        B, longest = len(prompts), max(len(prompt) for prompt in prompts)
        ids_BS = np.full((B, longest), self.manifest.pad_token_id, np.int64)
        mask_BS = np.zeros((B, longest), np.int64)
        for row, prompt in enumerate(prompts):
            ids_BS[row, longest - len(prompt) :] = prompt
            mask_BS[row, longest - len(prompt) :] = 1
        in_place = self._profile.layout == "in place"
        state = State(
            self._ort,
            self.manifest.caches,
            B,
            device=self.device,
            capacity=max(capacity or 0, longest) if in_place else None,
        )
        graph = "prefill" if "prefill" in self._graphs else "decode"
        chunk = self._chunk or longest
        for begin in range(0, longest, chunk):
            logits = self._run(graph, state, ids_BS[:, begin : begin + chunk], mask_BS[:, begin : begin + chunk])
        state.bindings.pop("prefill", None)  # the binding would keep the prompt's caches alive as long as the state
        return state, logits

    def step(self, state: State, tokens: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Read one more token per row. Return the logits of the rows' next tokens, float32 [batch, vocab].

        Raises :class:`InputError` for a wrong number of tokens, ids outside of the vocabulary, or a full context.
        """
        ids_B = np.asarray(tokens)
        vocab, limit = self.manifest.vocab_size, self.manifest.max_position
        if ids_B.shape != (state.batch,) or ids_B.dtype.kind not in "iu":
            raise InputError(f"tokens are {ids_B.dtype} {list(ids_B.shape)}, expected {state.batch} whole numbers")
        if ids_B.min() < 0 or ids_B.max() >= vocab:
            raise InputError(f"tokens are {ids_B.tolist()}, expected ids from 0 to {vocab - 1}")
        if limit is not None and np.any(~state.ended & (state.positions >= limit)):
            raise InputError(f"the state already holds {limit} tokens of a row, the model has no position for more")
        ids_BS = ids_B.astype(np.int64)[:, None]
        return self._run("decode", state, ids_BS, np.ones_like(ids_BS))

    def _run(
        self, graph: str, state: State, ids_BS: npt.NDArray[np.int64], mask_BS: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """Call a graph once, and return the logits of each row's last token. A failure leaves the state usable."""
        session = self._graphs[graph]
        binding = state.bindings.get(graph)
        if binding is None:
            binding = state.bindings[graph] = session.io_binding()
        # Padding tokens (before a row's first token and after its last) may have any valid position.
        positions_BS = np.maximum(
            state.positions[:, None] + np.where(state.ended[:, None], 0, mask_BS.cumsum(1)) - 1, 0
        )
        inputs = (np.ascontiguousarray(ids_BS), state.mask_with(mask_BS), positions_BS)
        for name, value in zip(TOKENS, inputs, strict=True):
            binding.bind_cpu_input(name, value)
        binding.bind_output("logits", "cpu")  # bound anew in each call, so that earlier logits are not overwritten
        state.bind(binding, state.length + ids_BS.shape[1])
        try:
            session.run_with_iobinding(binding)
        except engine.errors(self._ort) as error:
            file = self.directory / self.manifest.graphs[graph]
            raise ModelFileError(f"onnxruntime failed in {file}, {ids_BS.shape} tokens: {error}") from error
        outputs = binding.get_outputs_as_ortvaluevector()
        state.advance(outputs, mask_BS)
        return to_float32(view(outputs[0], self.manifest.dtype)[:, -1], self.manifest.dtype)

    def _open(
        self, file: str, options: SessionOptions, providers: Sequence[tuple[str, dict[str, object]]]
    ) -> InferenceSession:
        """Open the session of one graph, and check its inputs and outputs against the manifest."""
        path = self.directory / file
        session = engine.open_graph(self._ort, path, self.manifest.dtype, options, providers)
        caches = self.manifest.caches
        expected_inputs = dict.fromkeys(TOKENS, "tensor(int64)") | {c.past: _TYPES[c.dtype] for c in caches}
        expected_outputs = {"logits": _TYPES[self.manifest.dtype]} | {c.present: _TYPES[c.dtype] for c in caches}
        for what, found, expected in (
            ("inputs", session.get_inputs(), expected_inputs),
            ("outputs", session.get_outputs(), expected_outputs),
        ):
            got = {value.name: value.type for value in found}
            wrong = sorted(name for name in got.keys() | expected.keys() if got.get(name) != expected.get(name))
            if wrong:
                name = wrong[0]
                raise ModelFileError(
                    f"{path}: of its {what}, {name} is {got.get(name, 'missing')}, expected "
                    f"{expected.get(name, 'none of that name')} as the manifest says; export the model again"
                )
        return session

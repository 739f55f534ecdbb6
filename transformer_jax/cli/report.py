"""Final report of a training run, with its results and the commands to run next."""

from __future__ import annotations

import contextlib
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from transformer_jax.config import TrainConfig
from transformer_jax.config.tasks import (
    ChatTask,
    ClassifyTask,
    LanguageTask,
    MaskedTask,
    PreferenceTask,
    PrefixTask,
    Seq2SeqTask,
)

if TYPE_CHECKING:
    from transformer_jax.training.loop import Result


def summary(result: Result) -> str:
    """Return the sample, the held-out loss and the list of files as text."""
    lines = ["", result.sample.strip("\n"), ""] if result.sample else []
    nats = result.val_loss_per_character
    nats = result.val_loss if nats is None else nats
    if nats is None:
        lines.append("held-out loss: not finite")
    elif result.perplexity is None:
        lines.append(f"held-out loss: {nats:.4f} nats per pair (0.6931: no preference)")
        if result.accuracy is not None:
            lines.append(f"the chosen answer is preferred in {result.accuracy:.1%} of the pairs")
    else:
        # Print both units, because papers on character models use bits and training logs use nats.
        bits = nats / math.log(2)
        lines.append(f"held-out loss: {nats:.4f} nats per {result.unit} = {bits:.4f} bits")
        if result.accuracy is not None:
            accuracy = f"accuracy {result.accuracy:.1%}"
            lines.append(f"perplexity {result.perplexity:.2f} per token, {accuracy}")
    if result.scores:
        lines.append(", ".join(f"{name} {value:.4g}" for name, value in result.scores.items()))
    if result.rejected:
        lines.append(f"{result.rejected} steps were skipped because their loss was not finite")
    compared = isinstance(result.config.task, Seq2SeqTask | PrefixTask)
    if compared and (hint := missing_metrics(result.scores)) is not None:
        lines.append(hint)
    sample = "sample.txt, " if result.config.sample_tokens else ""
    files = f"loss.png, metrics.jsonl, {sample}scores.json, checkpoints"
    lines.append(f"in {result.config.out}: {files}")
    return "\n".join(lines)


def missing_metrics(scores: Mapping[str, float]) -> str | None:
    """Return a hint if texts were evaluated without BLEU and chrF, which need sacrebleu."""
    if "exact_match" not in scores or "chrf" in scores:
        return None
    return "BLEU and chrF need sacrebleu: run pip install sacrebleu"


def how_to_resume(config: TrainConfig, command: str, more: str = "") -> str:
    """Return the shell command that resumes a run.

    Data from standard input are not stored in the run folder. The command contains TEXT in their
    place, because the data must be passed again.
    """
    text = " < TEXT" if config.data == "-" else ""
    return f"{command} --out {shell_path(config.out)} --resume{more}{text}"


def shell_path(path: str) -> str:
    """Quote a path for the shell."""
    # A path that begins with a dash would be parsed as a flag.
    return shlex.quote(f"./{path}" if path.startswith("-") else path)


def explain_text(config: TrainConfig) -> str:
    """Return an explanation of TEXT to print before the command from `how_to_resume`."""
    return " (TEXT: a file with the data from standard input)" if config.data == "-" else ""


def registration_note(config: TrainConfig) -> str | None:
    """Return a note that custom kinds must be registered for the printed commands, or None."""
    kinds = (type(config.model), type(config.task))
    custom = [k for k in kinds if k.__module__.partition(".")[0] != "transformer_jax"]
    if not custom:
        return None
    names = " and ".join(f"{kind.__qualname__} (module {kind.__module__})" for kind in custom)
    return f"These commands work only in a script that registers {names}."


def how_to_write(result: Result) -> str:
    """Return the command that generates text, with a prompt that the tokenizer can read."""
    prompt = suggested_prompt(result)
    ending = f" --prompt {shlex.quote(prompt)}" if prompt else ""
    return f"python -m transformer_jax generate --model {shell_path(result.config.out)}{ending}"


def suggested_prompt(result: Result) -> str:
    """Return the prompt of the first example, or words of the sample, or else an empty string."""
    from transformer_jax.checkpoints.run_folder import RunFolder

    lines = result.sample.split("\n")
    match result.config.task:  # the sample's format depends on the task
        case MaskedTask():
            return lines[1] if len(lines) > 1 else ""
        case ClassifyTask() | ChatTask() | PreferenceTask():
            return lines[0].partition(": ")[2]
        # The samples of the other tasks are lines of the form `source -> target`.
        case task if not isinstance(task, LanguageTask):
            return lines[0].partition(" -> ")[0]
    tokenizer = RunFolder(Path(result.config.out)).read_tokenizer()
    # Use only plain words, because the line is pasted into a shell.
    words = [word for word in result.sample.split() if word.isascii() and word.isalpha()]
    for start in (" ".join(words[:3]), *words[:1], "The"):
        with contextlib.suppress(ValueError):
            if len(tokenizer.encode(start)):
                return start
    return ""

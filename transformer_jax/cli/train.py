"""Train a model for a task.

    python train.py                                  on Python's documentation, about two minutes
    python train.py --data book.txt --out runs/book
    python train.py --data book.txt --model lstm --out runs/lstm
    python train.py --data FOLDER                    on the output of `prepare`
    python train.py --task masked --data book.txt --out runs/masked
    python train.py --task seq2seq --data pairs.tsv --out runs/translator
    python train.py --task classify --data labels.tsv --init-from runs/masked --out runs/classes
    python train.py --task reverse --model gru --out runs/reverse
    python train.py --task digits --out runs/digits  pictures to words; tones: sound to letters
    python train.py --out runs/book --resume         continues a run

Tasks: language, masked, seq2seq, prefix, classify, chat and preference. The tasks reverse, copy,
addition, dates, recall, modular, digits and tones generate their data from the seed. The run folder
contains the config, the tokenizer, the checkpoints, the curves and a sample. To use the model, run:
    python -m transformer_jax generate --model runs/book --prompt "Once"
    python -m transformer_jax evaluate --model runs/book --data FILE
To train on a corpus that is larger than memory, first convert it to a folder of tokens:
    python -m transformer_jax prepare --data FILE ... --out FOLDER
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from transformer_jax.cli.process import escape_unprintable, interrupts, keep_freed_memory, one_line
from transformer_jax.cli.programs import keep_programs
from transformer_jax.cli.report import (
    explain_text,
    how_to_resume,
    how_to_write,
    registration_note,
    summary,
)
from transformer_jax.cli.run_flags import configure, parse
from transformer_jax.config import ConfigError

SCRIPT = "python train.py"
"""Training command in a checkout of the repository."""


def main(
    argv: Sequence[str] | None = None, command: str = "python -m transformer_jax train"
) -> int:
    """Run the training command and return its exit status.

    Status 0 means that the model was trained, and status 1 means that the run failed. Status 2
    means a usage, config or data error, and status 128 + n means that signal n ended the run.
    Printed lines refer to the command as `command`.
    """
    escape_unprintable()
    argv = list(sys.argv[1:] if argv is None else argv)
    # This must precede JAX's first allocation, because it changes how the heap grows.
    keep_freed_memory()
    try:
        return _train(argv, command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if "--debug" in argv:
            raise
        print(f"{command.split()[-1]}: {one_line(error)}", file=sys.stderr)
        # Import here, because modules of training import JAX.
        from transformer_jax.training.data import DataError

        return 2 if isinstance(error, ConfigError | DataError) else 1


def _train(argv: Sequence[str], command: str) -> int:
    """Train, print the report and return the exit status."""
    flags = parse(argv, (__doc__ or "").replace(SCRIPT, command), command)
    if not flags.start.join():  # the processes of a run must not share compiled programs
        keep_programs()
    config, vocab_size = configure(flags)

    from transformer_jax.training.loop import fit
    from transformer_jax.training.processes import is_first
    from transformer_jax.training.progress import progress_for_output, show

    if config.data == "-" and sys.stdin is not None and sys.stdin.isatty():
        show("reading the text from standard input; press Ctrl-D to end it")
    progress = progress_for_output()
    with interrupts() as received:
        result = fit(
            config, resume=flags.start.resume, vocab_size=vocab_size, progress=progress,
            stop=lambda: bool(received),
        )  # fmt: skip
    status = 128 + (received or [signal.SIGTERM])[0] if result.interrupted else 0
    if not is_first():  # only the first process prints
        return status
    if result.interrupted:
        show(f"stopped at step {result.step}; to continue{explain_text(config)}:")
        show(f"  {how_to_resume(config, command)}")
    else:
        show(summary(result))
        if config.task.reads_numbers:  # numbers cannot be typed as a prompt
            show("To continue training:")
        else:
            show(f"To generate text, or to continue training{explain_text(config)}:")
            show(f"  {how_to_write(result)}")
        # A model of counts, such as an n-gram model, cannot be trained further.
        if config.steps > 1:
            show(f"  {how_to_resume(config, command, f' --steps {2 * config.steps}')}")
    if (note := registration_note(config)) is not None:
        show(note)
    return status

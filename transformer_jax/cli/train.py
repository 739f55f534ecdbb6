"""Train a model for a task.

    python train.py                                  Python's own documentation, about two minutes
    python train.py --data book.txt --out runs/book
    python train.py --data book.txt --model lstm --out runs/lstm
    python train.py --data FOLDER                    what the command prepare wrote
    python train.py --task masked --data book.txt --out runs/masked
    python train.py --task seq2seq --data pairs.tsv --out runs/translator
    python train.py --task classify --data labels.tsv --init-from runs/masked --out runs/classes
    python train.py --task reverse --model gru --out runs/reverse
    python train.py --task digits --out runs/digits  pictures to words; tones: sound to letters
    python train.py --out runs/book --resume         goes on where it stopped

Tasks: language, masked, seq2seq, prefix, classify, chat, preference; and, made of the seed,
reverse, copy, addition, dates, recall, modular, digits, tones. The run folder then holds the
config, the tokenizer, the checkpoints, the curves and a sample. What to do with the model:
    python -m transformer_jax generate --model runs/book --prompt "Once"
    python -m transformer_jax evaluate --model runs/book --data FILE
A corpus larger than memory becomes a folder of tokens first:
    python -m transformer_jax prepare --data FILE ... --out FOLDER
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

from transformer_jax.cli.process import interrupts, keep_freed_memory, one_line, print_anything
from transformer_jax.cli.programs import keep_programs
from transformer_jax.cli.report import how_to_resume, how_to_write, summary, what_text
from transformer_jax.cli.run_flags import configure, parse
from transformer_jax.config import ConfigError

SCRIPT = "python train.py"
"""How the command is typed in a checkout."""


def main(
    argv: Sequence[str] | None = None, command: str = "python -m transformer_jax train"
) -> int:
    """Run the command, which is typed as `command`, and return its exit status.

    0: trained; 1: the run failed; 2: usage, config or data; 128 + n: ended by signal n.
    """
    print_anything()
    argv = list(sys.argv[1:] if argv is None else argv)
    # Before JAX allocates anything: it changes how the heap grows.
    keep_freed_memory()
    try:
        return _train(argv, command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if "--debug" in argv:
            raise
        print(f"{command.split()[-1]}: {one_line(error)}", file=sys.stderr)
        # Imported only now, because modules of training import JAX.
        from transformer_jax.training.data import DataError

        return 2 if isinstance(error, ConfigError | DataError) else 1


def _train(argv: Sequence[str], command: str) -> int:
    """Train as the flags say, report, and return the exit status."""
    flags = parse(argv, (__doc__ or "").replace(SCRIPT, command), command)
    if not flags.start.join():  # of several, one would read what another compiled for itself
        keep_programs()
    config, vocab_size = configure(flags)

    from transformer_jax.training.loop import fit
    from transformer_jax.training.processes import is_first
    from transformer_jax.training.progress import progress_for_output, show

    if config.data == "-" and sys.stdin is not None and sys.stdin.isatty():
        show("reading the text from standard input, up to Ctrl-D")
    progress = progress_for_output()
    with interrupts() as received:
        result = fit(
            config, resume=flags.start.resume, vocab_size=vocab_size, progress=progress,
            stop=lambda: bool(received),
        )  # fmt: skip
    if not is_first():  # which says it all
        return 128 + (received or [signal.SIGTERM])[0] if result.interrupted else 0
    if result.interrupted:
        show(f"stopped at step {result.step}; to go on{what_text(config)}:")
        show(f"  {how_to_resume(config, command)}")
        return 128 + (received or [signal.SIGTERM])[0]
    show(summary(result))
    if config.task.reads_numbers:  # which no prompt can hold
        show("Train on:")
    else:
        show(f"Write with the model, or train on{what_text(config)}:")
        show(f"  {how_to_write(result)}")
    # A model that is counted, such as n-grams, has nothing to continue.
    if config.steps > 1:
        show(f"  {how_to_resume(config, command, f' --steps {2 * config.steps}')}")
    return 0

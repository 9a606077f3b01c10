"""A text as numbers: words are read, and counted into a vocabulary."""

from __future__ import annotations

import hashlib
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

__all__ = ["Corpus", "read_corpus"]

_SUFFIXES = (".txt", ".md", ".rst", ".py")
# Of the standard library: installed packages, tests and machine-made tables say little about Python.
_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"}
_WORD = re.compile(r"[^\W\d_]{2,}")  # letters of any script; what joins them in an identifier parts them here


@dataclass(frozen=True)
class Corpus:
    """A text as numbers of words.

    Attributes:
        source: where it came from, for the report.
        words: the vocabulary, the most frequent word first.
        counts: `[V]`, int64, how often each occurs.
        stream: `[N]`, int64, the text; words outside the vocabulary, and some very frequent ones, are left out.
        num_bytes: read.
    """

    source: str
    words: list[str]
    counts: torch.Tensor
    stream: torch.Tensor
    num_bytes: int

    def digest(self) -> str:
        """Return the corpus's identity."""
        state = hashlib.sha256("\n".join(self.words).encode())
        state.update(self.stream.numpy().tobytes())
        return state.hexdigest()


def read_corpus(
    text: str | None, *, max_bytes: int, min_count: int, max_words: int, keep: float, seed: int, least: int
) -> Corpus:
    """Read a text.

    Args:
        text: a file or a folder, of which all .txt, .md, .rst and .py files are read in the order of their names; None
            for the sources of Python's standard library.
        max_bytes: to read.
        min_count: how often a word must occur.
        max_words: size of the vocabulary.
        keep: of a word with a share f of the text, a share sqrt(keep / f) stays, if that is below 1; 0 for all.
        seed: of the draw of those.
        least: words that the text must have in the end.

    Raises:
        ValueError: the text cannot be read, or is too short.
    """
    source, parts = _parts(text)
    pieces, rest = [], max_bytes
    for part in parts:
        try:
            with part.open("rb") as file:
                piece = file.read(rest)
        except OSError as error:
            raise ValueError(f"text: {str(part)!r} cannot be read: {error.strerror}") from error
        pieces.append(piece.decode("utf-8", errors="ignore").lower())
        rest -= len(piece)
        if not rest:
            break
    found = [word for piece in pieces for word in _WORD.findall(piece)]
    common = sorted(Counter(found).items(), key=lambda item: (-item[1], item[0]))
    common = [item for item in common if item[1] >= min_count][:max_words]
    numbers = {word: number for number, (word, _) in enumerate(common)}
    stream = np.fromiter((numbers[word] for word in found if word in numbers), dtype=np.int64)
    if keep:
        counts = np.array([count for _, count in common], dtype=np.float64)
        stays = np.sqrt(keep * max(len(stream), 1) / counts)
        stream = stream[np.random.default_rng(seed).random(len(stream)) < stays[stream]]
    if len(stream) < least or len(common) < 2:
        raise ValueError(
            f"text: {source} has {len(stream)} words of {len(common)} that occur at least {min_count} times; expected "
            f"at least {least} words of 2: pass a longer text, a smaller --min-count, or more --max-bytes"
        )
    counts = torch.tensor([count for _, count in common])
    return Corpus(source, [word for word, _ in common], counts, torch.from_numpy(stream), max_bytes - rest)


def _parts(text: str | None) -> tuple[str, list[Path]]:
    """Return the name of the text, and its files."""
    if text is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        source, parts = "the sources of Python's standard library", list(_files(folder, (".py",), _LEFT_OUT))
    else:
        folder = Path(text)
        source = text
        parts = [folder] if folder.is_file() else list(_files(folder, _SUFFIXES, set()))
    if not parts:
        raise ValueError(f"text: expected a file, or a folder with {', '.join(_SUFFIXES)} files, got {str(folder)!r}")
    return source, parts


def _files(folder: Path, suffixes: tuple[str, ...], left_out: set[str]) -> Iterator[Path]:
    for where, folders, names in os.walk(folder):
        folders[:] = sorted(set(folders) - left_out)
        yield from (Path(where, name) for name in sorted(names) if name.endswith(suffixes))

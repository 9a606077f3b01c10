"""The word-vector training: text, batches, model, losses against one process, resuming, report, command line."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sparse_embedding_train
import torch
from kept_pes import in_processes
from PIL import Image
from rich.console import Console
from sparse_training import report as training_report
from sparse_training.batches import Batch, Batches
from sparse_training.loop import read_text, run_pe
from sparse_training.model import WordVectors, neighbors
from sparse_training.options import Options
from sparse_training.text import Corpus, read_corpus

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
CPU = torch.device("cpu")


# ---- text ----------------------------------------------------------------------------------------------------------


def corpus_of(path: Path | None, **changes: Any) -> Corpus:
    taken = {"max_bytes": 1 << 20, "min_count": 1, "max_words": 1000, "keep": 0.0, "seed": 0, "least": 1, **changes}
    return read_corpus(None if path is None else str(path), **taken)


def test_a_text_becomes_numbers_of_words(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("The cat_sat, the CAT2cat: a Ünder-the\nthe naïve.")
    corpus = corpus_of(path)
    # By frequency, then by name; single letters and digits are no words, and join none.
    assert corpus.words == ["the", "cat", "naïve", "sat", "ünder"]
    assert corpus.counts.tolist() == [4, 3, 1, 1, 1]
    assert " ".join(corpus.words[number] for number in corpus.stream) == "the cat sat the cat cat ünder the the naïve"
    assert corpus.num_bytes == len(path.read_bytes())
    common = corpus_of(path, min_count=2)
    assert common.words == ["the", "cat"] and common.stream.tolist() == [0, 1, 0, 1, 1, 0, 0]
    assert corpus_of(path, max_words=3).words == ["the", "cat", "naïve"]
    assert corpus_of(path, max_bytes=11).words == ["cat", "sat", "the"]
    assert common.digest() != corpus.digest() and corpus_of(path).digest() == corpus.digest()


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    texts = {"b.txt": "first", "a/z.md": "third", "c.py": "second", "d.bin": "never", "a/b/c.rst": "fourth"}
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    corpus = corpus_of(tmp_path)
    assert [corpus.words[number] for number in corpus.stream.tolist()] == ["first", "second", "third", "fourth"]


def test_the_standard_library_is_there_and_speaks_python() -> None:
    corpus = corpus_of(None, min_count=5)
    assert corpus.num_bytes == 1 << 20 and len(corpus.stream) > 50_000
    assert {"self", "return", "import", "class"} <= set(corpus.words[:200])


def test_frequent_words_are_thinned(tmp_path: Path) -> None:
    path = tmp_path / "text"
    words = ["often"] * 20_000 + [f"rare{letter}" for letter in "abcdefgh"] * 10
    random.Random(0).shuffle(words)
    path.write_text(" ".join(words))
    whole, thinned = corpus_of(path), corpus_of(path, keep=1e-3)
    assert whole.counts.tolist() == thinned.counts.tolist() == [20_000, *[10] * 8]
    counts = torch.bincount(thinned.stream).tolist()
    share = 20_000 / 20_080
    expected = 20_000 * math.sqrt(1e-3 / share)
    assert abs(counts[0] - expected) < 5 * math.sqrt(expected)
    assert counts[1:] == [10] * 8
    assert corpus_of(path, keep=1e-3, seed=1).digest() != thinned.digest() == corpus_of(path, keep=1e-3).digest()


def test_texts_that_do_not_do_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a file, or a folder with .txt, .md, .rst, .py files, got"):
        corpus_of(tmp_path)
    with pytest.raises(ValueError, match="expected a file, or a folder"):
        corpus_of(tmp_path / "nowhere")
    path = tmp_path / "text"
    path.write_text("too short to train with")
    with pytest.raises(ValueError, match="has 5 words of 5 that occur at least 1 times; expected at least 6"):
        corpus_of(path, least=6)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="has 0 words of 0"):
        corpus_of(path, keep=1e-3)
    (tmp_path / "link.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="text: '.*/link.txt' cannot be read: No such file or directory"):
        corpus_of(tmp_path)


# ---- batches -------------------------------------------------------------------------------------------------------


def drawn_corpus(length: int, vocabulary: int = 40) -> Corpus:
    """Return a text in which the surrounding words identify every place."""
    shares = 1.0 / torch.arange(1, vocabulary + 1)
    stream = torch.multinomial(shares, length, replacement=True, generator=torch.Generator().manual_seed(4))
    counts = torch.bincount(stream, minlength=vocabulary).clamp(min=1)
    return Corpus("drawn", [f"word{number}" for number in range(vocabulary)], counts, stream, 0)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_shares_make_up_the_batch_of_one_process(world_size: int) -> None:
    batches = Batches(drawn_corpus(50), Options(batch=7, window=2, negatives=3), CPU)
    for step in (0, 1, 9):  # 46 words to predict: step 6 begins another epoch in its midst
        whole = batches.share(step, 0, 1)
        assert whole.contexts.shape == (7, 4) and whole.words.shape == (7, 4)
        shares = [batches.share(step, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([share.contexts for share in shares]), whole.contexts)
        assert torch.equal(torch.cat([share.words for share in shares]), whole.words)
        assert {len(share.words) for share in shares} <= {7 // world_size, 7 // world_size + 1}


def test_an_epoch_predicts_every_word_once_from_the_words_around_it() -> None:
    corpus = drawn_corpus(1010)
    batches, other = (Batches(corpus, Options(batch=50, window=5, seed=seed), CPU) for seed in range(2))
    assert batches.num_targets == 1000

    def epoch(first: int, batches: Batches = batches) -> list[tuple[int, ...]]:
        parts = [batches.share(step, 0, 1) for step in range(first, first + 20)]
        return [
            (*context, int(words[0]))
            for part in parts
            for context, words in zip(part.contexts.tolist(), part.words, strict=True)
        ]

    stream = corpus.stream.tolist()
    expected = sorted((*stream[n - 5 : n], *stream[n + 1 : n + 6], stream[n]) for n in range(5, 1005))
    one, two = epoch(0), epoch(20)
    assert sorted(one) == sorted(two) == expected
    assert one != two and one != expected and one != epoch(0, other)


def test_negatives_follow_the_frequencies_to_three_quarters() -> None:
    corpus = drawn_corpus(2000, vocabulary=12)
    batches = Batches(corpus, Options(batch=4000, negatives=25), CPU)
    drawn = torch.bincount(batches.share(3, 0, 1).words[:, 1:].flatten(), minlength=12).double()
    shares = corpus.counts.double() ** 0.75
    expected = shares / shares.sum() * drawn.sum()
    assert float(((drawn - expected).square() / expected).sum()) < 35  # 11 degrees of freedom: mean 11, deviation 4.7


# ---- model ---------------------------------------------------------------------------------------------------------


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    model = WordVectors(30, 6, seed=1, device=CPU).double()
    torch.nn.init.normal_(model.predicted.weight, generator=torch.Generator().manual_seed(2))
    torch.nn.init.normal_(model.context.weight, generator=torch.Generator().manual_seed(3))
    batch = Batches(drawn_corpus(100, 30), Options(batch=9, window=2, negatives=3), CPU).share(0, 0, 1)
    contexts, predicted = (table.weight.detach().clone().requires_grad_() for table in (model.context, model.predicted))
    expected = torch.zeros((), dtype=torch.float64)
    for context, words in zip(batch.contexts.tolist(), batch.words.tolist(), strict=True):
        hidden = torch.stack([contexts[row] for row in context]).mean(0)
        for place, word in enumerate(words):
            sign = 1.0 if place == 0 else -1.0
            expected = expected + torch.log1p(torch.exp(-sign * (hidden @ predicted[word])))
    expected.backward()
    loss = model(batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    for table, exact in ((model.context, contexts), (model.predicted, predicted)):
        assert table.weight.grad.is_sparse
        assert torch.allclose(table.weight.grad.to_dense(), exact.grad, rtol=1e-10, atol=1e-12)


def test_the_first_vectors_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    one = WordVectors(20, 8, seed=5, device=CPU)
    torch.manual_seed(2)
    assert torch.equal(WordVectors(20, 8, seed=5, device=CPU).context.weight, one.context.weight)
    assert not torch.equal(WordVectors(20, 8, seed=6, device=CPU).context.weight, one.context.weight)
    assert float(one.context.weight.detach().abs().max()) <= 0.5 / 8 and not bool(one.predicted.weight.any())
    scores = one(Batch(torch.tensor([[1, 2]]), torch.tensor([[3, 4, 5]])))
    assert float(scores.detach()) == pytest.approx(3 * math.log(2), rel=1e-6)


def test_neighbors_point_the_same_way() -> None:
    vectors = torch.tensor([[1.0, 0.0], [10.0, 0.1], [0.0, 3.0], [-2.0, 0.0], [0.5, 0.5]])
    found = neighbors(vectors, 0, 3)
    assert [row for row, _ in found] == [1, 4, 2]
    assert [cosine for _, cosine in found] == pytest.approx([0.99995, 0.70711, 0.0], abs=1e-5)
    assert len(neighbors(vectors, 2, 9)) == 4


# ---- training ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a text whose words come in fixed phrases, so that there is something to learn."""
    drawer = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(drawer.choices(letters, k=5)) for _ in range(120)]
    phrases = [drawer.sample(words, 6) for _ in range(40)]
    path = tmp_path_factory.mktemp("text") / "phrases.txt"
    path.write_text(" ".join(word for _ in range(800) for word in drawer.choice(phrases)))
    return path


def options_of(text: Path, output: Path, **changes: Any) -> Options:
    taken = {
        "text": str(text),
        "output": str(output),
        "dim": 12,
        "batch": 61,  # no two numbers of PEs that are tested divide it
        "window": 2,
        "steps": 12,
        "keep": 0.0,
        "checkpoint_every": 5,
        "overlap_steps": 0,
        **changes,
    }
    return Options(**taken)


def run(options: Options, world: int, backend: str) -> dict[str, Any]:
    taken = dataclasses.replace(options, backend=backend)
    return dict(in_processes(run_pe, world, taken, timeout=250)[0])


def exact_losses(options: Options) -> list[float]:
    """Train in this process, in fp64, with dense gradients, and Adam written out."""
    corpus = read_text(options)
    batches = Batches(corpus, options, CPU)
    model = WordVectors(len(corpus.words), options.dim, seed=options.seed, device=CPU).double()
    tables = list(model.parameters())
    state = [{"t": 0, "m": torch.zeros_like(table), "v": torch.zeros_like(table)} for table in tables]
    losses = []
    for step in range(options.steps):
        model.zero_grad()
        loss = model(batches.share(step, 0, 1)) / options.batch
        loss.backward()
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for table, each in zip(tables, state, strict=True):
                gradient = table.grad.to_dense()
                rows = table.grad.coalesce().indices()[0]  # Adam leaves the other rows' moments as they are
                each["t"] += 1
                each["m"][rows] = 0.9 * each["m"][rows] + 0.1 * gradient[rows]
                each["v"][rows] = 0.999 * each["v"][rows] + 0.001 * gradient[rows].square()
                size = options.learning_rate * math.sqrt(1 - 0.999 ** each["t"]) / (1 - 0.9 ** each["t"])
                table[rows] -= size * each["m"][rows] / (each["v"][rows].sqrt() + 1e-8)
    return losses


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_losses_are_those_of_one_process(backend: str, world: int, text: Path, tmp_path: Path) -> None:
    options = options_of(text, tmp_path, steps=30, learning_rate=0.03, check_steps=8)
    report = run(options, world, backend)
    expected = exact_losses(options)
    assert expected[-1] < 0.9 * expected[0]  # what learns nothing proves nothing
    assert report["losses"] == pytest.approx(expected, rel=2e-5)
    assert report["same_bits"] and training_report.passed(report)
    assert report["one_process"]["losses"] == pytest.approx(expected[:8], rel=1e-5)
    assert len(report["norms"]) == len(report["one_process"]["norms"]) == 8
    assert (report["pes"], report["backend"], report["first_step"]) == (world, backend, 0)
    assert report["num_words"] == 4800 and report["passes"] is None
    assert report["seconds"] > 0 and report["timed_steps"] == 20


def test_a_resumed_training_goes_on_as_if_it_had_not_ended(backend: str, text: Path, tmp_path: Path) -> None:
    whole = run(options_of(text, tmp_path / "whole", steps=13), 2, backend)
    parts = tmp_path / "parts"
    first = run(options_of(text, parts, steps=7), 2, backend)
    assert first["losses"] == whole["losses"][:7]
    kept = (parts / "checkpoint.pt").read_bytes()
    second = run(options_of(text, parts, steps=13, is_resumed=True, check_steps=4), 2, backend)
    assert second["losses"] == whole["losses"] and second["first_step"] == 7
    assert len(second["one_process"]["losses"]) == 4 and training_report.passed(second)
    assert second["neighbors"] == whole["neighbors"]
    assert not list(parts.glob("*.part"))
    (parts / "checkpoint.pt").write_bytes(kept)
    alone = run(options_of(text, parts, steps=13, is_resumed=True), 1, backend)  # another number of PEs
    assert alone["losses"] == pytest.approx(whole["losses"], rel=2e-5) and alone["losses"][:7] == whole["losses"][:7]


def test_timed_passes_and_a_timeline_change_nothing(backend: str, text: Path, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    report = run(options_of(text, tmp_path, steps=3, overlap_steps=2, trace=str(path)), 2, backend)
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "launch"}
    assert "sparse_all_reduce" in names
    assert set(report["passes"]) == {"hook", "after", "none"}
    assert all(0 < seconds < 60 for seconds in report["passes"].values())
    assert report["same_bits"]
    plain = run(options_of(text, tmp_path, steps=3), 2, backend)
    assert plain["losses"] == report["losses"]


def test_more_pes_than_words(backend: str, text: Path, tmp_path: Path) -> None:
    """A PE without a word has empty gradients, and a loss of 0."""
    options = options_of(text, tmp_path, batch=2, steps=4, learning_rate=0.1)
    report = run(options, 3, backend)
    assert report["losses"] == pytest.approx(exact_losses(options), rel=2e-5)
    assert training_report.passed(report)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def good_report() -> dict[str, Any]:
    return {
        "options": dataclasses.asdict(Options()),
        "source": "a text",
        "num_bytes": 1000,
        "num_words": 200,
        "vocabulary": 30,
        "pes": 2,
        "backend": "cuda",
        "hardware": ["a GPU", "a GPU"],
        "first_step": 1,
        "losses": [4.0, 3.0, 2.0],
        "norms": [1.0, 2.0],
        "one_process": {"losses": [3.0, 2.0], "norms": [1.0, 2.0]},
        "same_bits": True,
        "timed_steps": 2,
        "seconds": 0.5,
        "passes": {"hook": 0.010, "after": 0.012, "none": 0.008},
        "neighbors": {"file": [("open", 0.75)]},
        "shares_gpu": False,
    }


def test_the_verdict_sees_what_is_wrong() -> None:
    assert training_report.passed(good_report())
    wrong = {
        "losses differ from those of one process by 0.33 (tolerance 1e-05)": {"losses": [4.0, 2.0, 2.0]},
        "losses differ from those of one process by inf (tolerance 1e-05)": {"losses": [4.0, 3.0, math.nan]},
        "norms of gradients differ from those of one process by 0.5 (tolerance 1e-05)": {"norms": [1.0, 3.0]},
        "the tables differ between PEs": {"same_bits": False},
    }
    for text, change in wrong.items():
        assert training_report.problems(good_report() | change) == [text]


def printed(report: dict[str, Any]) -> str:
    console = Console(width=100, record=True, file=io.StringIO())
    training_report.print_report(report, console)
    return " ".join(console.export_text().split())


def test_the_report_says_what_is_hidden() -> None:
    text = printed(good_report())
    for part in (
        "on the cuda backend: 2 x a GPU",
        "a text: 1,000 bytes, 200 words, 30 different ones",
        "loss 4.000 -> 2.000 in 3 steps of 2048 words, the first 1 before",
        "8,192 words/s, 250.0 ms per step",
        "losses and norms of gradients of 2 steps are those of one process",
        "communication adds 2.00 ms, 20% of a forward and backward pass; 50% of it is hidden",
        "file open 0.75",
    ):
        assert part in text, text
    assert "WRONG: the tables differ" in printed(good_report() | {"same_bits": False})
    host = printed(good_report() | {"backend": "host"})
    assert "nothing can be hidden" in host and "times say nothing about GPUs" in host
    assert "of it is hidden" not in printed(good_report() | {"passes": {"hook": 0.01, "after": 0.007, "none": 0.008}})


# ---- the command line ----------------------------------------------------------------------------------------------

QUICK = {
    "backend": "host",
    "max-bytes": "60000",
    "dim": "8",
    "batch": "64",
    "steps": "6",
    "check-steps": "2",
    "overlap-steps": "1",
}


def command_of(output: Path, *more: str) -> list[str]:
    return [*(word for name, value in QUICK.items() for word in (f"--{name}", value)), "--output", str(output), *more]


@pytest.mark.host
def test_prints_records_draws_and_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record, output = tmp_path / "training.jsonl", tmp_path / "out"
    arguments = command_of(output, "--pes", "2", "--json", str(record), "--words", "self,nosuchword")
    assert sparse_embedding_train.main(arguments) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Sparse embedding training on the host backend: 2 x CPU process",
        "the sources of Python's standard library: 60,000 bytes",
        "in 6 steps of 64 words",
        "correct: losses and norms of gradients of 2 steps are those of one process",
        "by po.nn.ddp_sparse_hook",
        "nothing can be hidden",
        "--resume --steps 12 goes on",
    ):
        assert part in text, text
    assert "nosuchword" not in text and " self " in text
    before = (output / "loss.png").read_bytes()
    assert sparse_embedding_train.main([*arguments, "--resume", "--steps", "9"]) == 0
    assert "in 9 steps of 64 words, the first 6 before" in " ".join(capsys.readouterr().out.split())
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert lines[1]["losses"][:6] == lines[0]["losses"] and len(lines[1]["losses"]) == 9
    assert all(line["date"] and line["versions"]["torch"] == torch.__version__ for line in lines)
    with Image.open(output / "loss.png") as image:
        assert image.size == (1040, 585) and len(image.convert("RGB").getcolors(1 << 20) or ()) > 10
    assert (output / "loss.png").read_bytes() != before


@pytest.mark.host
def test_checkpoints_of_other_trainings_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = command_of(tmp_path, "--pes", "1", "--check-steps", "0", "--overlap-steps", "0")
    assert sparse_embedding_train.main(command) == 0
    for changes, said in (
        (["--seed", "3"], "is of another training: seed 0, not 3"),
        (["--max-bytes", "70000"], "is of another training: text "),
        ([], "--steps: the checkpoint has 6 already; pass more than that"),
    ):
        assert sparse_embedding_train.main([*command, "--resume", *changes]) == 2
        assert said in capsys.readouterr().err
    (tmp_path / "checkpoint.pt").write_bytes(b"something else")
    assert sparse_embedding_train.main([*command, "--resume"]) == 2
    assert "is no checkpoint of this program" in capsys.readouterr().err


@pytest.mark.host
def test_torchrun(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(LAUNCH / "sparse_embedding_train.py"), *command_of(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Sparse embedding training") == 1 and "2 x CPU process" in done.stdout
    assert "correct" in done.stdout and (tmp_path / "loss.png").is_file()

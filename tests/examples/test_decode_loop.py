"""The decode loop: its tokens against a plain fp64 decoder, how it is started, its report, its model folders."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import decode_loop
import pytest
import torch
from decode import report as decode_report
from decode.config import SIZES, ModelConfig, Partition, RopeScaling, config_of_folder
from decode.kernels import Kernels, _attend_step, _store, rope_tables
from decode.loop import run_pe
from decode.methods import FlashInfer, Peers, Unfused
from decode.options import Options
from decode.weights import FolderWeights, RandomWeights
from kept_pes import in_processes
from rich.console import Console
from torch.nn import functional as F

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
CPU = torch.device("cpu")
TINY = SIZES["tiny"]
QUICK = Options(tokens=16, rounds=1, dtype="fp32", timeout=60.0)


# ---- a plain decoder -----------------------------------------------------------------------------------------------


class PlainDecoder:
    """Llama as in its paper: no cache, no shards, all positions computed again for each token, fp64."""

    def __init__(self, config: ModelConfig, weights: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.weights = {name: weight.double() for name, weight in weights.items()}

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt() * self.weights[name]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + D / 2) of `[T, heads, D]` as complex numbers."""
        length, _, dim = x.shape
        half = dim // 2
        frequencies = self.config.rope_theta ** (-torch.arange(half).double() / half)
        turns = torch.polar(torch.ones(length, half).double(), torch.arange(length).double()[:, None] * frequencies)
        rotated = torch.complex(x[..., :half], x[..., half:]) * turns[:, None]
        return torch.cat([rotated.real, rotated.imag], dim=-1)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        config, weights = self.config, self.weights
        x = weights["model.embed_tokens.weight"][tokens]
        later = torch.ones(len(tokens), len(tokens), dtype=torch.bool).triu(1)
        for number in range(config.num_layers):
            prefix = f"model.layers.{number}"
            normed = self.norm(x, f"{prefix}.input_layernorm.weight")
            q, k, v = (
                F.linear(normed, weights[f"{prefix}.self_attn.{each}_proj.weight"]).view(
                    len(tokens), -1, config.head_dim
                )
                for each in "qkv"
            )
            q, k = self.rotate(q), self.rotate(k)
            heads = []
            for head in range(config.num_heads):
                shared = head // config.group
                scores = q[:, head] @ k[:, shared].T / math.sqrt(config.head_dim)
                heads.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v[:, shared])
            x = x + F.linear(torch.cat(heads, dim=-1), weights[f"{prefix}.self_attn.o_proj.weight"])
            normed = self.norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate, up = (F.linear(normed, weights[f"{prefix}.mlp.{each}_proj.weight"]) for each in ("gate", "up"))
            x = x + F.linear(gate * torch.sigmoid(gate) * up, weights[f"{prefix}.mlp.down_proj.weight"])
        return F.linear(self.norm(x, "model.norm.weight")[-1], weights["lm_head.weight"])

    def generate(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[len(prompt) :]


def shapes_of(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab, config.hidden),
        "model.norm.weight": (config.hidden,),
        "lm_head.weight": (config.vocab, config.hidden),
    }
    for number in range(config.num_layers):
        prefix = f"model.layers.{number}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (config.hidden,),
            f"{prefix}.post_attention_layernorm.weight": (config.hidden,),
            f"{prefix}.self_attn.q_proj.weight": (heads, config.hidden),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads, config.hidden),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads, config.hidden),
            f"{prefix}.self_attn.o_proj.weight": (config.hidden, heads),
            f"{prefix}.mlp.gate_proj.weight": (config.intermediate, config.hidden),
            f"{prefix}.mlp.up_proj.weight": (config.intermediate, config.hidden),
            f"{prefix}.mlp.down_proj.weight": (config.hidden, config.intermediate),
        }
    return shapes


def drawn_weights(config: ModelConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    source = RandomWeights(seed, CPU, torch.float32, None)
    return {name: source.read(name, shape) for name, shape in shapes_of(config).items()}


def plain_tokens(config: ModelConfig, options: Options, weights: dict[str, torch.Tensor]) -> list[list[int]]:
    decoder = PlainDecoder(config, weights)
    prompts = options.prompts(config.vocab).tolist()
    return [decoder.generate(prompt, options.tokens + 1) for prompt in prompts]


@functools.cache
def expected_tokens(options: Options) -> list[list[int]]:
    return plain_tokens(TINY, options, drawn_weights(TINY, options.seed))


# ---- the loop ------------------------------------------------------------------------------------------------------


def run(options: Options, world: int, backend: str) -> dict[str, Any]:
    options = dataclasses.replace(options, model=options.model or "tiny", backend=backend)
    reports = in_processes(run_pe, world, options, timeout=250)
    for report in reports[1:]:
        assert report == reports[0], "the PEs report different things"
    return reports[0]


@pytest.mark.parametrize(
    ("world", "options"),
    [
        pytest.param(1, QUICK, id="1"),
        pytest.param(2, QUICK, id="2"),
        pytest.param(3, dataclasses.replace(QUICK, batch=3, prompt_length=7, seed=1), id="3, three sequences"),
        pytest.param(4, dataclasses.replace(QUICK, wire_dtype="own", algorithm="two_shot", prefetch=True), id="4"),
    ],
)
def test_tokens_are_those_of_a_plain_decoder(backend: str, world: int, options: Options) -> None:
    report = run(options, world, backend)
    expected = expected_tokens(options)
    assert len({token for tokens in expected for token in tokens}) > 10  # a model that says one thing proves nothing
    labels = [method["label"] for method in report["methods"]]
    assert labels[:3] == ["fused", "fused sums", "fused norm"] and len(labels) >= 4
    for method in report["methods"]:
        assert method["tokens"] == expected, method["label"]
        assert method["equal_tokens"] == options.tokens + 1
        assert method["difference"] < 1e-5 and method["is_repeatable"]
        assert [len(rounds) for rounds in method["seconds"]] == [options.rounds] * world
    assert report["reference"]["tokens"] == expected
    assert report["reference"]["equal_tokens"] == options.tokens + 1
    assert report["reference"]["difference"] < 1e-5
    assert decode_report.passed(report)
    rows = options.batch * options.num_prompt_tokens
    assert report["prefill"]["rows"] == rows
    assert report["prefill"]["path"] == ("all_reduce" if rows > 16 else "fused")
    assert report["pes"] == world and report["backend"] == backend and report["layers"] == TINY.num_layers
    assert report["has_graphs"] == (backend == "cuda" and world <= torch.cuda.device_count())


def test_16_bits_stay_within_the_tolerance(backend: str) -> None:
    report = run(dataclasses.replace(QUICK, dtype="bf16", tokens=8, rounds=2, prompt=(1, 2, 3)), 2, backend)
    assert decode_report.problems(report) == []
    assert all(method["difference"] > 0 for method in report["methods"][2:])
    assert report["prefill"] | {"seconds": 0} == {"rows": 3, "path": "fused", "seconds": 0}


def test_few_layers_a_timeline_and_no_reference(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    report = run(dataclasses.replace(QUICK, layers=1, tokens=2, reference=False, trace=str(path)), 2, backend)
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "launch"}
    assert {"gemv_all_reduce", "all_reduce"} & names
    assert report["layers"] == 1 and report["reference"] is None
    shallow = dataclasses.replace(TINY, num_layers=1)
    expected = plain_tokens(shallow, dataclasses.replace(QUICK, tokens=2), drawn_weights(shallow))
    assert report["methods"][0]["tokens"] == expected
    console = Console(width=100, record=True, file=io.StringIO())
    decode_report.print_report(report, console)
    assert "2 layers of the model were left out" in console.export_text()


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.mark.host
def test_prints_one_table_and_records_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    record = tmp_path / "decode.jsonl"
    arguments = ["--backend", "host", "--pes", "2", "--tokens", "6", "--rounds", "1", "--json", str(record)]
    assert decode_loop.main(arguments) == 0
    assert decode_loop.main([*arguments, "--seed", "1", "--pes", "1", "--dtype", "bf16"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for text in (
        "tiny, 3 of 3 layers, float32, batch 1, prompt 32, 6 tokens after the first",
        "matmul + gloo",
        "one PE alone 7/7",
        "correct: the first step's logits agree",
        "prefill: 32 rows took linear + po.all_reduce",
        "prefill: 32 rows took po.gemm_all_reduce",
        "times say nothing about GPUs",
    ):
        assert text in printed, printed
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [line["options"]["seed"] for line in lines] == [0, 1]
    assert all(line["date"] and line["versions"]["torch"] == torch.__version__ for line in lines)


# ---- the verdict ---------------------------------------------------------------------------------------------------


def good_report() -> dict[str, Any]:
    def method(label: str, difference: float) -> dict[str, Any]:
        tokens = [[1, 2, 3]]
        return {
            "label": label,
            "tokens": tokens,
            "equal_tokens": 3,
            "difference": difference,
            "seconds": [[1.0, 2.0, 9.0], [3.0, 1.0, 2.5]],
            "is_repeatable": True,
        }

    return {
        "dtype": "float32",
        "layers": 2,
        "methods": [method("fused", 0.0), method("other", 1e-6)],
        "reference": {"tokens": [[1, 2, 3]], "equal_tokens": 3, "difference": 1e-6},
    }


def test_the_verdict_sees_what_is_wrong() -> None:
    assert decode_report.passed(good_report())
    assert decode_report.seconds_per_token(good_report()["methods"][0]) == 2.5
    for path, value, text in (
        (("methods", 1, "difference"), 1e-3, "other: logits differ from the fused ones by 0.001"),
        (("methods", 1, "difference"), math.inf, "other: logits differ from the fused ones by inf"),
        (("methods", 0, "is_repeatable"), False, "fused: the tokens differ between rounds or PEs"),
        (("reference", "difference"), 1e-3, "fused: logits differ from the single-rank reference by 0.001"),
        (("reference", "equal_tokens"), 2, "fused: tokens differ from the single-rank reference"),
    ):
        report = good_report()
        entry: Any = report
        for key in path[:-1]:
            entry = entry[key]
        entry[path[-1]] = value
        assert decode_report.problems(report) == [text]
    report = good_report() | {"dtype": "bfloat16"}
    report["reference"]["equal_tokens"] = 2  # in 16 bits a near tie may fall differently
    report["methods"][1]["difference"] = 0.01
    assert decode_report.passed(report)


# ---- shapes, weights and folders -----------------------------------------------------------------------------------


def test_named_sizes_have_their_published_parameters() -> None:
    billions = {"8B": 8.03, "70B": 70.6, "405B": 405.9}
    for name, expected in billions.items():
        elements = sum(math.prod(shape) for shape in shapes_of(SIZES[name]).values())
        assert elements / 1e9 == pytest.approx(expected, rel=2e-3)


def test_a_layer_on_eight_pes_has_the_shapes_that_the_operator_is_measured_at() -> None:
    partition = Partition.of(SIZES["70B"], 8)
    assert partition.intermediate == (3584,) * 8 and partition.kv_heads == (1,) * 8
    weights = 10_240 * 8192 + 8192 * 8192 + 3 * 28_672 * 8192
    assert partition.layer_elements(SIZES["70B"]) == weights // 8 + 2 * 8192
    assert Partition.of(SIZES["8B"], 3).kv_heads == (3, 3, 2)
    assert all(share % 64 == 0 for share in Partition.of(SIZES["8B"], 3).intermediate)


def test_random_parts_make_up_the_whole() -> None:
    source = RandomWeights(3, CPU, torch.float32, None)
    whole = source.read("a.weight", (10, 6))
    assert torch.equal(
        torch.cat([source.read("a.weight", (10, 6), first=a, last=b) for a, b in ((0, 7), (7, 10))]), whole
    )
    assert torch.equal(source.read("a.weight", (10, 6), dim=1, first=2, last=5), whole[:, 2:5])
    assert not torch.equal(source.read("b.weight", (10, 6)), whole)
    parts = [RandomWeights(3, CPU, torch.float32, rank) for rank in range(2)]
    shards = [part.read("a.weight", (4000, 100), first=0, last=200) for part in parts]
    assert not torch.equal(*shards)
    assert torch.equal(parts[0].read("n.weight", (9,)), parts[1].read("n.weight", (9,)))  # what all PEs hold
    assert float(shards[0].std()) == pytest.approx(0.1, rel=0.05)


def test_a_cut_model_runs(backend: str) -> None:
    report = run(dataclasses.replace(QUICK, cut=2, tokens=3, rounds=1), 2, backend)
    assert decode_report.problems(report) == []
    expected = {"name": "tiny cut by 2", "intermediate": 88, "num_heads": 4, "num_kv_heads": 2, "vocab": 130}
    assert report["model"] == dataclasses.asdict(TINY) | expected


@pytest.mark.parametrize("name", ["tiny", "8B"])
@pytest.mark.parametrize("position", [0, 1, 17, 23])
def test_a_step_attends_as_a_prefill_does(name: str, position: int) -> None:
    """What torch.compile is given for a step, run as it is, against the products that a prefill takes."""
    config, batch, heads, slots = SIZES[name], 3, 2, 24
    rng = torch.Generator().manual_seed(position)
    cache = torch.randn(2, batch, heads, slots, config.head_dim, generator=rng)
    qkv = torch.randn(batch, (config.group + 2) * heads * config.head_dim, generator=rng)
    at, every, rope = torch.tensor([position]), torch.arange(slots), rope_tables(config, slots, CPU)
    ours = cache.clone()
    wanted = Kernels(config, is_compiled=False).attend(qkv, cache, at, every, rope)
    query = _store(qkv, ours, at, *rope, config.group)
    found = _attend_step(query, ours, at, every, config.head_dim**-0.5)
    assert torch.equal(ours, cache)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_llama3_scaling_stretches_long_wavelengths_only() -> None:
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64)
    config = dataclasses.replace(TINY, head_dim=64, rope_theta=10_000.0)
    plain, stretched = (
        torch.atan2(*reversed(rope_tables(each, 2, CPU)))[1].double()
        for each in (config, dataclasses.replace(config, rope_scaling=scaling))
    )
    wavelengths = 2 * math.pi / plain
    assert torch.allclose(stretched[wavelengths <= 16], plain[wavelengths <= 16], rtol=1e-5)
    assert torch.allclose(stretched[wavelengths > 64], plain[wavelengths > 64] / 8, rtol=1e-5)
    between = (wavelengths > 16) & (wavelengths <= 64)
    assert bool(between.any()) and bool((stretched[between] < plain[between]).all())
    assert bool((stretched[between] > plain[between] / 8).all())


DOCUMENT: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "vocab_size": 61,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def folder_of(path: Path, **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**DOCUMENT, **changes}))
    return path


def test_reads_a_configuration(tmp_path: Path) -> None:
    expected = ModelConfig(tmp_path.name, 48, 40, 2, 6, 3, 8, 61, rope_theta=5000.0, norm_eps=1e-6)
    assert config_of_folder(folder_of(tmp_path)) == expected
    scaling = RopeScaling(8.0, 1.0, 4.0, 8192)
    scaled = dataclasses.replace(expected, rope_scaling=scaling)
    assert config_of_folder(folder_of(tmp_path, rope_scaling=LLAMA3)) == scaled
    newer = folder_of(tmp_path, rope_theta=None, rope_parameters={**LLAMA3, "rope_theta": 7.0})
    assert config_of_folder(newer) == dataclasses.replace(scaled, rope_theta=7.0)
    assert config_of_folder(folder_of(tmp_path, head_dim=16)) == dataclasses.replace(expected, head_dim=16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be one of llama, mistral, got 'mamba'"),
        ({"attention_bias": True}, "attention_bias is True, which this decoder does not support"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rotary scaling must be 'default' or 'llama3', got 'yarn'"),
        ({"num_key_value_heads": 4}, "num_kv_heads must divide num_heads, got 4 and 6"),
        ({"hidden_size": 0}, "hidden must be a whole number of at least 1, got 0"),
    ],
)
def test_refuses_other_models(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        config_of_folder(folder_of(tmp_path, **changes))


def test_refuses_folders_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: No such file or directory; expected a Hugging Face"):
        config_of_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        config_of_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="lacks 'num_attention_heads'"):
        config_of_folder(tmp_path)


def test_names_the_library_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="pip install safetensors"):
        FolderWeights(tmp_path, CPU, torch.float32)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    torch_files = pytest.importorskip("safetensors.torch", reason="pip install safetensors")
    folder = folder_of(tmp_path / "model")
    weights = drawn_weights(config_of_folder(folder), seed=5)
    names = sorted(weights)
    for number, part in enumerate((names[::2], names[1::2])):
        torch_files.save_file({name: weights[name] for name in part}, folder / f"model-{number}.safetensors")
    return folder


@pytest.mark.parametrize("world", [1, 3])
def test_decodes_a_model_folder(backend: str, world: int, model_folder: Path) -> None:
    options = dataclasses.replace(QUICK, model=str(model_folder), tokens=12, reference=True)
    report = run(options, world, backend)
    config = config_of_folder(model_folder)
    assert report["methods"][0]["tokens"] == plain_tokens(config, options, drawn_weights(config, seed=5))
    assert decode_report.passed(report) and report["model"]["name"] == "model"


def test_a_model_folder_that_does_not_fit_its_configuration_is_refused(model_folder: Path) -> None:
    source = FolderWeights(model_folder, CPU, torch.bfloat16)
    assert source.read("model.norm.weight", (48,)).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"expected model.norm.weight of shape \[40\], got \[48\]"):
        source.read("model.norm.weight", (40,))
    with pytest.raises(ValueError, match="no safetensors file has model.layers.9.mlp.up_proj.weight"):
        source.read("model.layers.9.mlp.up_proj.weight", (40, 48))
    files = list(model_folder.glob("*.safetensors"))
    for content in (files[0].read_bytes()[:-1], b"", b"\xff" * 40):
        files[0].write_bytes(content)
        with pytest.raises(ValueError, match=r"model-\d.safetensors is no safetensors file, or is cut off"):
            FolderWeights(model_folder, CPU, torch.float32)
    for file in files:
        file.unlink()
    with pytest.raises(ValueError, match=r"holds no \*.safetensors"):
        FolderWeights(model_folder, CPU, torch.float32)


def test_flashinfer_closes_half_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the plain way, with a stand-in that does what FlashInfer documents; it needs a GPU itself."""
    made = {}

    def allreduce_fusion(x: torch.Tensor, workspace: object, pattern: int, **given: Any) -> None:
        assert workspace is made["workspace"] and pattern == 1 and given["launch_with_pdl"] and given["fp32_acc"]
        total = given["residual_out"].copy_(x + given["residual_in"])
        given["norm_out"].copy_(given["rms_gamma"] * F.rms_norm(total, total.shape[-1:], eps=given["rms_eps"]))

    driver = types.ModuleType("cuda.bindings.driver")
    driver.cuMulticastCreate = create_multicast = lambda _: (0, 1)  # type: ignore[attr-defined]
    wants_multicast = False

    def create_allreduce_fusion_workspace(**arguments: object) -> object:
        if wants_multicast:
            driver.cuMulticastCreate(None)
        made.update(arguments, workspace=object())
        return made["workspace"]

    comm = types.ModuleType("flashinfer.comm")
    comm.AllReduceFusionPattern = types.SimpleNamespace(kARResidualRMSNorm=1)  # type: ignore[attr-defined]
    comm.allreduce_fusion = allreduce_fusion  # type: ignore[attr-defined]
    comm.create_allreduce_fusion_workspace = create_allreduce_fusion_workspace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.comm", comm)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)

    method = FlashInfer(batch=3, hidden=8, dtype=torch.float32)
    assert [made[name] for name in ("backend", "world_size", "max_token_num", "hidden_dim")] == ["trtllm", 1, 3, 8]
    method.probe(torch.empty(3, 8))
    kernels = Kernels(TINY, is_compiled=False)
    linear, generator = torch.nn.Linear(4, 8, bias=False), torch.Generator().manual_seed(1)
    x, residual, norm = (torch.randn(shape, generator=generator) for shape in ((3, 4), (3, 8), (8,)))
    expected = Unfused(Peers(0, 1)).close(kernels, linear, x, residual, norm)
    for result, other in zip(method.close(kernels, linear, x, residual, norm), expected, strict=True):
        torch.testing.assert_close(result, other)

    wants_multicast = True
    with pytest.raises(RuntimeError, match="multicast"):
        FlashInfer(batch=3, hidden=8, dtype=torch.float32)
    assert driver.cuMulticastCreate is create_multicast

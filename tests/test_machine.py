"""The machine's description, and the cache of its rates in good days and bad."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from featherweight import cgroup, machine, native, rates
from featherweight.machine import Gpu, Machine
from featherweight.rates import Rate, Rates

RATE = Rate.of([9.0, 11.0, 10.0], "GB/s")
RATES = Rates("native", "avx2", 2, {1: RATE, 2: replace(RATE, value=20.0)}, RATE, None, 1 << 28)
HERE = machine.describe()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEATHERWEIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machines measured, instead of measuring them."""
    calls: list[Machine] = []

    def measure(machine: Machine) -> Rates:
        calls.append(machine)
        return RATES

    monkeypatch.setattr(rates, "measure", measure)
    return calls


def test_description_is_plausible() -> None:
    assert HERE.cpu
    assert 0 < HERE.usable_cores <= HERE.logical_cores
    assert 0 < HERE.memory_available <= HERE.memory_total
    assert HERE.torch_threads >= 1


def test_description_survives_json() -> None:
    described = replace(HERE, gpus=(Gpu("H", 80 << 30, "9.0"),))
    assert Machine.from_json(json.loads(json.dumps(described.to_json()))) == described


@pytest.mark.parametrize(
    ("features", "bf16", "fp16"),
    [
        (("avx2", "f16c"), False, False),
        (("avx512f", "avx512_vnni"), False, False),
        (("avx512_bf16",), True, False),
        (("amx_bf16", "avx512_fp16"), True, True),
        (("neon", "neon_fp16", "dotprod"), False, True),
        (("neon", "bf16"), True, False),
    ],
    ids=["zen3", "cascade-lake", "zen4", "sapphire-rapids", "a76", "arm-bf16"],
)
def test_fast_half_precision(features: tuple[str, ...], bf16: bool, fp16: bool) -> None:
    described = replace(HERE, features=features)
    assert (described.has_fast_bf16, described.has_fast_fp16) == (bf16, fp16)


def test_rates_survive_json() -> None:
    assert Rates.from_json(json.loads(json.dumps(RATES.to_json()))) == RATES
    assert RATES.peak_bandwidth.value == 20.0
    assert RATE.cv == pytest.approx(0.1)


def test_probe_measures_once(cache: Path, measured: list[Machine]) -> None:
    assert machine.probe() == RATES
    assert machine.probe() == replace(RATES, from_cache=True)
    assert len(measured) == 1
    assert machine.probe(refresh=True) == RATES
    assert len(measured) == 2
    assert len(list(cache.iterdir())) == 1


SPREAD = Rate.of([20.0, 30.0, 25.0], "GB/s")


@pytest.mark.parametrize(
    "found",
    [
        replace(
            RATES, bandwidth={1: RATE, 2: replace(RATE, value=9.0)}
        ),  # a thread more, and slower
        replace(
            RATES, bandwidth={4: replace(RATE, value=9.0), 2: RATE, 1: replace(RATE, value=8.0)}
        ),
        replace(RATES, bandwidth={1: RATE, 2: SPREAD}),
        replace(RATES, fp32=SPREAD),
    ],
    ids=["slower", "slower at last", "spread", "spread of arithmetic"],
)
def test_rates_of_a_busy_machine_are_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch, found: Rates
) -> None:
    monkeypatch.setattr(rates, "measure", lambda machine: found)
    assert not found.steady
    note = "the machine was busy: not kept, and measured again next time"
    for _ in range(2):
        assert machine.probe() == replace(found, notes=(note,))
    assert not cache.exists()


def test_a_little_less_from_more_threads_is_steady() -> None:
    assert RATES.steady
    assert replace(RATES, bandwidth={1: RATE, 2: replace(RATE, value=9.6)}).steady
    assert replace(RATES, bandwidth={2: RATE, 1: replace(RATE, value=5.0)}).steady


@pytest.mark.usefixtures("cache")
def test_rates_of_an_older_make_are_measured_anew(
    monkeypatch: pytest.MonkeyPatch, measured: list[Machine]
) -> None:
    with monkeypatch.context() as older:
        older.setattr(rates, "_SCHEMA", rates._SCHEMA - 1)
        machine.probe()
    assert machine.probe() == RATES
    assert len(measured) == 2


def test_other_threads_are_another_machine(cache: Path, measured: list[Machine]) -> None:
    rates.cached(HERE)
    rates.cached(replace(HERE, torch_threads=HERE.torch_threads + 1))
    assert len(measured) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"rates": {}}', b"\xff\xfe", b"null"])
def test_a_corrupt_cache_is_measured_anew(
    cache: Path, measured: list[Machine], content: bytes
) -> None:
    machine.probe()
    [file] = cache.iterdir()
    file.write_bytes(content)
    assert machine.probe() == RATES
    assert machine.probe().from_cache
    assert len(measured) == 2


def test_an_unwritable_cache_leaves_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[Machine]
) -> None:
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("FEATHERWEIGHT_CACHE", str(blocker / "cache"))
    found = machine.probe()
    assert found.bandwidth == RATES.bandwidth
    assert "not cached" in found.notes[0]


@pytest.mark.parametrize("source", ["native", "torch"])
def test_measuring(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    if source == "native" and not native.status().available:
        pytest.skip(str(native.status().error))
    if source == "torch":
        missing = native.Status(available=False, error="gone")
        monkeypatch.setattr(native, "status", lambda: missing)
    monkeypatch.setattr(rates, "_BANDWIDTH_SECONDS", 0.1)
    monkeypatch.setattr(rates, "_ARITHMETIC_SECONDS", 0.1)
    found = rates.measure(replace(HERE, last_level_cache=1 << 20))
    assert found.source == source
    assert found.working_set == min(256 << 20, HERE.memory_available // 4)
    assert (found.int8 is None) == (source == "torch")
    assert 1 in found.bandwidth
    for rate in (*found.bandwidth.values(), found.fp32):
        assert 0 < rate.low <= rate.value <= rate.high
        assert len(rate.samples) >= 3


def test_a_working_set_within_the_cache_is_noted() -> None:
    nbytes, notes = rates._working_set(
        replace(HERE, memory_available=1 << 30, last_level_cache=1 << 28)
    )
    assert nbytes == 1 << 28
    assert "may include cache hits" in notes[0]


@pytest.mark.parametrize(
    ("threads", "counts"),
    [(1, [1]), (3, [1, 2, 3]), (12, [1, 2, 4, 8, 12]), (16, [1, 2, 4, 8, 16])],
)
def test_thread_counts(threads: int, counts: list[int]) -> None:
    assert rates._thread_counts(threads) == counts


@pytest.mark.parametrize(
    ("groups", "files", "quota", "memory"),
    [
        ("0::/", {}, None, None),
        (
            "0::/box",
            {
                "box/cpu.max": "150000 100000",
                "cpu.max": "max 100000",
                "box/memory.max": "1000",
                "box/memory.current": "700",
                "box/memory.stat": "anon 500\ninactive_file 100",
            },
            1.5,
            (1000, 400),
        ),
        (
            "4:memory:/box\n2:cpu,cpuacct:/",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "-1",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
                "memory/box/memory.limit_in_bytes": "1000",
                "memory/box/memory.usage_in_bytes": "300",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "5000",
            },
            None,
            (1000, 700),
        ),
    ],
    ids=["none", "v2", "v1"],
)
def test_container_limits(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    quota: float | None,
    memory: tuple[int, int] | None,
) -> None:
    own = tmp_path / "own"
    own.write_text(groups)
    for name, content in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    monkeypatch.setattr(cgroup, "_OWN", own)
    monkeypatch.setattr(cgroup, "_ROOT", tmp_path / "root")
    assert cgroup.cpu_quota() == quota
    assert cgroup.memory() == memory

"""The text for people: what stands where, at narrow and wide terminals, and safe from markup."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from featherweight.measure.result import Figure, Report, Row
from featherweight.report import render


def lines_of(report, width, **options):
    return render(report, "human", width=width, **options).splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
def test_no_line_is_wider_than_the_terminal(decoder, width):
    lines = lines_of(decoder, width)
    assert max(map(cell_len, lines)) <= width
    assert not any(line.endswith(" ") for line in lines)


def test_head_is_one_line(decoder):
    assert lines_of(decoder, 140)[0] == (
        "smollm2-135m, 135 M parameters · Example CPU, 2 cores, 2 threads"
        " · featherweight 0.1.0, torch 2.13.0"
    )


def test_wide_enough_means_one_table(decoder):
    lines = lines_of(decoder, 200)
    assert sum(line.startswith("recipe") for line in lines) == 1
    bf16 = next(line for line in lines if line.startswith("bf16 "))
    assert re.split(r"\s{2,}", bf16) == [
        "bf16",
        "257 MiB",
        "443 + 257 MiB",
        "22.9 ± 0.3",
        "14.2 ± 2.6",
        "8.02",
        "22.4 ± 0.4",
        "1234 ± 20",
        "40",
        "0.0004",
        "0.0039",
        "99.1 ± 0.2",
        "0.7",
        "17.86 ± 0.41",
        "1.0015 ± 0.0004",
    ]


def test_too_narrow_parts_memory_and_quality_from_speed(decoder):
    lines = lines_of(decoder, 140)
    heads = [i for i, line in enumerate(lines) if line.startswith("recipe")]
    assert len(heads) == 2
    first, second = (" ".join(" ".join(lines[i - 1 : i + 1]).split()) for i in heads)
    assert first == "peak KLD same RMS PPL recipe weights memory KLD 99 % top % Δp % PPL ratio"
    assert second == "pp512 tg64 gen ttft tg64@b8 bandwidth recipe t/s t/s t/s s t/s %"


def test_at_80_columns_every_cell_is_whole(decoder):
    text = render(decoder, "human", width=80)
    for cell in ("612 + 514 MiB", "9.51 ± 0.12", "27.3 ± 0.4*", "1234 ± 20", "3.00 GiB"):
        assert cell in text
    assert "\nnf4:double+flash+     3.00 GiB" in text  # folded at a joint of the recipe
    assert "\nfastpath (partial)\n" in text


def test_star_and_footnotes(decoder):
    lines = lines_of(decoder, 140)
    assert "* nf4:double+flash+fastpath: tg64 measured on 16 tokens of 64" in lines
    assert "peak memory: the process's own + mapped from files, each at its peak" in lines


def test_verdicts_notes_failures_and_gates(decoder):
    lines = lines_of(decoder, 300)
    at = lines.index("Against fp32 (in brackets: 95 % interval over 3 paired rounds):")
    assert lines[at + 1 :][:9] == [
        "bf16: decode 1.29× (1.22–1.36, faster), decode at batch 8 1.02× (0.97–1.08, no clear"
        " difference), prefill 0.16× (0.15–0.17, slower), weights 0.50×, peak memory 0.62×,"
        " KLD 0.0004, same top 99.1 %, PPL ratio 1.0015",
        "    no bf16 instructions on this CPU: matrix products run in a slow emulation",
        "nf4:double+flash+fastpath (partial): decode 2.47×, weights 5.99×, peak memory 0.085×,"
        " KLD <0.0001, same top 100.0 %",
        "    partial: out of time after 1 of 3 rounds",
        "int8:skip=a|b,[red]c (failed): no kernel for [bold] |x|",
        "",
        "bf16: KLD 0.0004 is above --max-kld 0.0001",
        "",
        "not all was measured in full: see the stars, notes and reasons above",
    ]


def test_texts_side_by_side(decoder):
    lines = lines_of(decoder, 80)
    assert lines[lines.index("Prompt: The capital of France is") + 1 :] == [
        "fp32                          Paris. ↵ It lies on the [Seine].",
        "baseline",
        "bf16                          Paris. ↵ It is big.",
        "first 4 of 9 tokens the same",
    ]


def test_best_speed_is_green_and_only_with_color(decoder):
    text = render(decoder, "human", width=200, color=True)
    green = [part.partition("\x1b")[0].strip() for part in text.split("\x1b[1;32m")[1:]]
    # A rate is best at its highest, a time at its lowest, and nothing is best of one.
    assert green == ["143 ± 2", "9.51 ± 0.12", "3.58 ± 0.05", "27.3 ± 0.4*"]
    assert "\x1b" not in render(decoder, "human", width=200)


def test_encoder_has_its_own_columns(encoder):
    lines = lines_of(encoder, 80)
    assert lines[:8] == [
        "minilm · unknown machine",
        "",
        "                            encode            neighbours",
        "recipe          weights        t/s    cosine           %",
        "────────────────────────────────────────────────────────",
        "fp32           87.0 MiB  5210 ± 40         –           –",
        "fp32+fastpath  87.0 MiB  9876 ± 99  >0.99999        99.6",
        "",
    ]


def test_hostile_text_is_shown_as_it_is():
    row = Row("[red]x[/red]\n\x1b[31m", status="failed", reason="[link=a]b[/] \\[c] :smile:")
    report = Report({"name": "[bold]m"}, {"cpu": "[i]"}, {}, {}, rows=[row])
    text = render(report, "human", width=80, color=True)
    assert "[bold]m · [i]" in text
    assert "[red]x[/red] [31m (failed): [link=a]b[/] \\[c] :smile:" in text
    assert "\x1b[31m" not in text


def test_long_recipe_without_joints_is_folded():
    row = Row("x" * 100, figures={"tg64": Figure(1.5, "t/s", 0.1, [1.5], 64, 64)})
    text = render(Report({}, {}, {}, {}, rows=[row]), "human", width=80)
    assert "1.50 ± 0.10" in text
    assert max(map(len, text.splitlines())) <= 80


def test_an_empty_report_and_str(decoder):
    assert render(Report({}, {}, {}, {}), "human", width=80).startswith("unnamed model")
    assert str(decoder) == render(decoder, "human")

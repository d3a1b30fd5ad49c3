"""Markdown that can be pasted: exact lines, and nothing that breaks the table."""

from __future__ import annotations

import re

from featherweight.measure.result import Report, Row
from featherweight.report import render


def test_table_of_a_decoder(decoder):
    lines = render(decoder, "md").splitlines()
    assert lines[:6] == [
        "| recipe | weights | peak memory | pp512 t/s | tg64 t/s | gen t/s | ttft s | tg64@b8 t/s"
        " | bandwidth % | KLD | KLD 99 % | same top % | RMS Δp % | PPL | PPL ratio |",
        "| :-- |" + " --: |" * 14,
        "| fp32 | 513 MiB | 612 + 514 MiB | 143 ± 2 | 11.0 ± 0.2 | 9.51 ± 0.12 | 3.58 ± 0.05 | –"
        " | 62 | – | – | – | – | 17.83 ± 0.41 | – |",
        "| bf16 | 257 MiB | 443 + 257 MiB | 22.9 ± 0.3 | 14.2 ± 2.6 | 8.02 | 22.4 ± 0.4"
        " | 1234 ± 20 | 40 | 0.0004 | 0.0039 | 99.1 ± 0.2 | 0.7 | 17.86 ± 0.41 | 1.0015 ± 0.0004 |",
        r"| nf4:double+flash+fastpath (partial) | 3.00 GiB | 96.0 MiB | – | 27.3 ± 0.4\* | – | –"
        r" | – | – | \<0.0001 | – | 100.0 | – | – | – |",
        r"| int8:skip=a\|b,\[red\]c (failed) |" + " – |" * 14,
    ]


def test_every_line_of_the_table_has_the_same_cells(decoder):
    table = [line for line in render(decoder, "md").splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_what_stands_below_the_table(decoder):
    lines = render(decoder, "md").splitlines()
    assert r"\* nf4:double+flash+fastpath: tg64 measured on 16 tokens of 64" in lines
    assert (
        r"- nf4:double+flash+fastpath (partial): decode 2.47×, weights 5.99×, peak memory 0.085×,"
        r" KLD \<0.0001, same top 100.0 %"
    ) in lines
    assert "  - partial: out of time after 1 of 3 rounds" in lines
    assert r"- int8:skip=a\|b,\[red\]c (failed): no kernel for \[bold\] \|x\|" in lines
    assert "**bf16: KLD 0.0004 is above --max-kld 0.0001**  " in lines
    assert "**not all was measured in full: see the stars, notes and reasons above**" in lines
    assert "Prompt: ` The capital of France is `" in lines
    assert "- bf16 (first 4 of 9 tokens the same): ` Paris. ↵ It is big. `" in lines
    assert lines[-1].endswith("2 threads · featherweight 0.1.0, torch 2.13.0")


def test_encoder(encoder):
    assert render(encoder, "md") == "\n".join(
        [
            "| recipe | weights | encode t/s | cosine | neighbours % |",
            "| :-- | --: | --: | --: | --: |",
            "| fp32 | 87.0 MiB | 5210 ± 40 | – | – |",
            "| fp32+fastpath | 87.0 MiB | 9876 ± 99 | >0.99999 | 99.6 |",
            "",
            "Against fp32 (in brackets: 95 % interval over 3 paired rounds):",
            "",
            "- fp32+fastpath: encode 1.90× (1.80–2.00, faster), weights 1.00×, cosine >0.99999,"
            " neighbours 99.6 %",
            "",
            "minilm · unknown machine",
        ]
    )


def test_model_text_stays_verbatim():
    said = {"text": "`a` ``b`` @someone *c* | d", "tokens": 5, "first_difference": None}
    row = Row("fp32", outputs=[said])
    text = render(Report({}, {}, {}, {}, rows=[row], prompts=["*p*"]), "md")
    assert "- fp32 (same 5 tokens): ``` `a` ``b`` @someone *c* | d ```" in text.splitlines()
    assert "Prompt: ` *p* `" in text.splitlines()

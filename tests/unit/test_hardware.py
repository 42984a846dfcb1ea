"""Hardware profiles: the paper's Table 1, and users' own files."""

from __future__ import annotations

import pytest

from efficient_lmcache.sizing.hardware import load_hardware

MINE = "B99:\n  bf16_tflops: 10\n  host_link_gb_s: 5\n  memory_gb: 8\n"


@pytest.mark.parametrize(("name", "kiloflop"), [("RTX3090", 2.2), ("H20", 2.3), ("H800", 15.5)])
def test_table_1_compute_per_host_link_byte_is_reproduced(name, kiloflop):
    assert load_hardware(name).flop_per_byte == pytest.approx(kiloflop * 1000, rel=0.02)


@pytest.mark.parametrize("name", ["H20", "h800", "rtx3090", "H100", "h200"])
def test_every_packaged_profile_names_its_source(name):
    profile = load_hardware(name)
    assert profile.name.lower() == name.lower()
    assert len(profile.source) > 20


def test_a_measured_restore_rate_takes_the_place_of_the_links_peak():
    assert load_hardware("H20").restore_bytes_per_s == pytest.approx(26.6 * 2**30)
    assert not load_hardware("H800").restore_measured
    assert load_hardware("H800").restore_bytes_per_s == pytest.approx(64e9)


def test_a_users_profile_is_added_and_replaces_a_packaged_one(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(MINE + "H20: {bf16_tflops: 1, host_link_gb_s: 1, memory_gb: 1, source: mine}\n")
    assert load_hardware("b99", file).flop_per_byte == pytest.approx(2000)
    assert load_hardware("B99", file).source == str(file)
    assert load_hardware("H20", file).source == "mine"
    assert load_hardware("H800", file).bf16_tflops == 989.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("B99: {bf16_tflops: 10, host_link_gb_s: 5}", "B99.memory_gb is None; it must be a number > 0"),
        (MINE + "  tflops: 3\n", "B99 has unknown fields tflops; allowed are bf16_tflops"),
        (MINE.replace("10", "fast"), "B99.bf16_tflops is 'fast'"),
        (MINE.replace("10", "0"), "B99.bf16_tflops is 0"),
        ("[1, 2]", "must map names of GPUs"),
        ("B99: 3", "must map names of GPUs"),
        ("B99:\n  a: [1\n", r"line 3: not YAML"),
        ("[" * 5000, "not YAML"),
    ],
)
def test_a_bad_file_is_an_error_naming_file_and_field(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        load_hardware("B99", file)
    assert "mine.yaml" in str(error.value)


def test_an_unknown_gpu_and_an_absent_file_are_errors_that_say_what_to_do(tmp_path):
    known = "H100, H20, H200, H800, RTX3090, RTXPRO6000"
    with pytest.raises(ValueError, match=f"'TPU' has no profile; known are {known}; --hardware"):
        load_hardware("TPU")
    with pytest.raises(ValueError, match=r"--hardware .*absent.yaml: cannot be read"):
        load_hardware("H20", tmp_path / "absent.yaml")

"""The `efficient.*` options: one error naming key, value and what is allowed."""

from __future__ import annotations

import pytest

from efficient_lmcache.connector.options import OptionError, parse_options
from efficient_lmcache.connector.serve import DEFAULT_TRANSFER_CONFIG, with_connector


def test_defaults_are_table_7_with_conditioned_admission():
    options = parse_options({"lmcache.chunk_size": 512, "use_native": False})
    assert (options.admission, options.write_threshold_chunks, options.occupancy_threshold) == ("conditioned", 8, 0.95)
    assert (options.activity_window_s, options.report_interval_s, options.report_max_age_s) == (60.0, 1.0, 5.0)


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("admission", "always", "none, fixed, conditioned"),
        ("mode", "client", "in_process, server"),
        ("server.http_url", "localhost:8080", "a string that matches `https?://"),
        ("write_threshold_chunks", -1, "an integer >= 0"),
        ("write_threshold_chunks", "8", "an integer >= 0"),
        ("occupancy_threshold", 1.5, "a number >= 0 and <= 1"),
        ("activity_window_s", 0, "a number > 0"),
        ("telemetry.transport", "file", "local, redis, off"),
        ("telemetry.deployment", "a:b", "a string that matches `[A-Za-z0-9._-]{1,64}`"),
        ("decision_log", 7, "a string or null"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_what_is_allowed(key, value, allowed):
    with pytest.raises(OptionError) as error:
        parse_options({f"efficient.{key}": value})
    assert f"efficient.{key}={value!r} is not allowed; allowed: {allowed}" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_former_name_of_the_transport_says_its_new_one():
    with pytest.raises(OptionError, match=r"efficient\.telemetry='off' .* write efficient\.telemetry\.transport=…"):
        parse_options({"efficient.telemetry": "off"})


def test_the_redis_transport_needs_a_url():
    with pytest.raises(OptionError, match=r"transport='redis' needs efficient\.telemetry\.redis_url"):
        parse_options({"efficient.telemetry.transport": "redis"})
    url = "rediss://engines@redis.example:6380/2?ssl_ca_certs=/etc/ca.pem"
    options = parse_options({"efficient.telemetry.transport": "redis", "efficient.telemetry.redis_url": url})
    assert (options.telemetry_redis_url, options.telemetry_deployment) == (url, "default")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("telemetry.redis_url", "redis://user:geheim@host"),
        ("telemetry.redis_url", "redis://host?password=geheim"),
        ("telemetry.redis_url", "redis://:[geheim@host"),
        ("telemetry.redis_url", "http://geheim@host"),
        ("telemetry.redis_url", "redis://host:geheim"),
        ("telemetry.redis_url", {"password": "geheim"}),
        ("telemetry.redis_password", "geheim"),
        ("telemetry.redis_password_file", ["geheim"]),
    ],
)
def test_what_may_be_a_password_is_refused_and_not_repeated(key, value):
    with pytest.raises(OptionError) as error:
        parse_options({f"efficient.{key}": value})
    assert f"efficient.{key}" in str(error.value)
    assert "geheim" not in str(error.value)


def test_options_that_vllm_nested_count_as_dotted():
    nested = {
        "efficient": {"telemetry": {"transport": "off"}, "admission": "fixed"},
        "lmcache": {"efficient": {"x": 1}},
    }
    options = parse_options(nested)
    assert (options.telemetry_transport, options.admission) == ("off", "fixed")
    with pytest.raises(OptionError, match=r"efficient\.telemetry\.transport='x' is not allowed"):
        parse_options({"efficient.telemetry": {"transport": "x"}})


def test_an_unknown_key_lists_the_known_ones():
    with pytest.raises(OptionError, match=r"efficient\.kappa=8 is not an option; allowed: efficient\.admission, "):
        parse_options({"efficient.kappa": 8})


def test_integers_are_numbers():
    assert parse_options({"efficient.activity_window_s": 30}).activity_window_s == 30.0


def test_serve_adds_the_connector_only_where_none_is_set():
    assert with_connector(["model"])[1] == "--kv-transfer-config"
    assert DEFAULT_TRANSFER_CONFIG["kv_connector"] in with_connector(["model"])[2]
    own = ["model", "--kv-transfer-config", '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}']
    assert with_connector(own) == own
    assert with_connector(["model", "--kv-transfer-config", "null"]) == ["model"]
    assert with_connector(["model", "--kv-transfer-config=null", "--port", "1"]) == ["model", "--port", "1"]


@pytest.mark.parametrize("text", ["{", "[]", '{"kv_connector_extra_config": {"efficient.admission": "x"}}'])
def test_serve_refuses_a_bad_transfer_configuration_before_vllm_starts(text):
    with pytest.raises(OptionError):
        with_connector(["model", "--kv-transfer-config", text])


def test_serve_keeps_a_transfer_configuration_from_a_config_file(tmp_path):
    file = tmp_path / "vllm.yaml"
    file.write_text('kv-transfer-config: \'{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}\'\n')
    assert with_connector(["model", "--config", str(file)]) == ["model", "--config", str(file)]
    file.write_text("kv_transfer_config: {kv_connector_extra_config: {efficient.admission: sometimes}}\n")
    with pytest.raises(OptionError, match="sometimes"):
        with_connector(["model", f"--config={file}"])
    file.write_text("port: 1\n")
    assert "--kv-transfer-config" in with_connector(["model", "--config", str(file)])


def test_serve_completes_dotted_options_with_the_connector():
    arguments = with_connector(["model", "--kv-transfer-config.kv_role=kv_both"])
    assert arguments[2:] == [
        "--kv-transfer-config.kv_connector=EfficientLMCacheConnector",
        "--kv-transfer-config.kv_load_failure_policy=recompute",
    ]


def test_a_dotted_extra_configuration_is_not_taken_for_the_connectors_name():
    extra = "--kv-transfer-config.kv_connector_extra_config.efficient.admission=none"
    arguments = with_connector(["model", extra])
    assert arguments[2:] == [
        "--kv-transfer-config.kv_connector=EfficientLMCacheConnector",
        "--kv-transfer-config.kv_role=kv_both",
        "--kv-transfer-config.kv_load_failure_policy=recompute",
    ]

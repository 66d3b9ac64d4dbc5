"""The HPARAMS and custom-scalars tabs of TensorBoard: settings of a run next to its results, and a layout of charts.

torch's own `hparams` writes booleans as numbers, because it asks for numbers first, and Python's booleans are some.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import DataType, Experiment, HParamInfo, MetricInfo, MetricName, Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo, SessionStartInfo
from torch.utils.tensorboard.summary import custom_scalars

Setting = bool | int | float | str
COMPARED = ("loss/valid", "perplexity/valid", "speed/tokens_per_second")  # next to the settings


def session_start(settings: Mapping[str, Setting]) -> tuple[Summary, Summary]:
    """Return the summaries that open a session: which columns there are, and this run's values."""
    infos = [HParamInfo(name=name, type=_type_of(value)) for name, value in settings.items()]
    results = [MetricInfo(name=MetricName(tag=tag)) for tag in COMPARED]
    start = SessionStartInfo()
    for name, value in settings.items():
        if isinstance(value, bool):
            start.hparams[name].bool_value = value
        elif isinstance(value, str):
            start.hparams[name].string_value = value
        else:
            start.hparams[name].number_value = value
    experiment = HParamsPluginData(
        experiment=Experiment(hparam_infos=infos, metric_infos=results), version=metadata.PLUGIN_DATA_VERSION
    )
    started = HParamsPluginData(session_start_info=start, version=metadata.PLUGIN_DATA_VERSION)
    return _summary(metadata.EXPERIMENT_TAG, experiment), _summary(metadata.SESSION_START_INFO_TAG, started)


def session_end() -> Summary:
    end = SessionEndInfo(status=Status.Value("STATUS_SUCCESS"))
    data = HParamsPluginData(session_end_info=end, version=metadata.PLUGIN_DATA_VERSION)
    return _summary(metadata.SESSION_END_INFO_TAG, data)


def _type_of(value: Setting) -> Any:
    if isinstance(value, bool):
        return DataType.Value("DATA_TYPE_BOOL")
    return DataType.Value("DATA_TYPE_STRING" if isinstance(value, str) else "DATA_TYPE_FLOAT64")


def _summary(tag: str, data: HParamsPluginData) -> Summary:
    plugin = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    return Summary(value=[Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin))])


def chart_layout(sources: Sequence[str], *, ranks: int) -> Summary:
    """Return the layout of the custom-scalars tab, without charts that would be empty."""
    bands = [f"valid_by_position/{band:02d}" for band in (1, 4, 8, 16)]
    training = {
        "loss, nats per token": _lines("loss/train", "loss/valid"),
        "held-out perplexity": _lines("perplexity/valid"),
        "held-out loss by position in the segment": _lines(*bands),
    }
    if sources:
        training["loss by source"] = _lines(*(f"loss/train/{name}" for name in sources))
    optimizer = {
        "learning rate": _lines("optimizer/learning_rate"),
        "gradient norm": _lines("optimizer/grad_norm"),
    }
    machine = {
        "tokens per second": _lines("speed/tokens_per_second"),
        "peak memory, GiB": _lines("memory/peak_gib"),
    }
    if ranks > 1:
        machine["forward passes of the slowest and the fastest rank, seconds"] = _lines(
            "ranks/slowest_forward", "ranks/fastest_forward"
        )
    summary: Summary = custom_scalars({"training": training, "optimizer": optimizer, "machine": machine})
    return summary


def _lines(*tags: str) -> list[object]:
    """Return a chart of these tags, which TensorBoard takes for patterns."""
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Setting]:
    """Return nested settings with keys such as `model.layers` and `stages.0.steps`, without those that are not set."""
    found: dict[str, Setting] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            found |= flat({str(index): item for index, item in enumerate(value)}, f"{prefix}{key}.")
        elif value is not None:
            found[prefix + key] = value if isinstance(value, bool | int | float | str) else str(value)
    return found

"""Configuration: the settings that recipes share, and what is asked of a config's fields."""

from app.config.fields import (
    as_flag,
    check,
    check_numbers,
    chosen,
    defaults,
    diff,
    each_field,
    finite,
    flatten,
    on_resume,
    put,
    to_dict,
    when_begun,
)
from app.config.settings import BestMetric, EMAConfig, OnResume, OptimConfig, RunConfig, setting

__all__ = [
    "BestMetric",
    "EMAConfig",
    "OnResume",
    "OptimConfig",
    "RunConfig",
    "as_flag",
    "check",
    "check_numbers",
    "chosen",
    "defaults",
    "diff",
    "each_field",
    "finite",
    "flatten",
    "on_resume",
    "put",
    "setting",
    "to_dict",
    "when_begun",
]

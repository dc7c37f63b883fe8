"""Registry of components: the kinds among which a key of the configuration selects.

A component has a specification without torch, which configuration and planner query, an
implementation (a torch module, an optimizer, a function), and possibly settings of its own. A
component of the package registers its specification and its implementation in two modules, because
a configuration is composed without torch; an extension registers both in one file.
"""

import dataclasses
import difflib
import typing
from collections.abc import Collection, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hlat.config.config_copies import CopiedConfig
from hlat.config.config_errors import ConfigError
from hlat.config.merge_speed import omit_node_copies
from hlat.config.package_dirs import list_choices
from hlat.config.precision import PrecisionConfig

SELECTORS = {
    "model.attention": "kind",
    "model.mlp": "kind",
    "model.norm": "kind",
    "optimizer": "name",
    "schedule": "name",
    "tracking": "metrics",
}
"""Key of each section that selects a component; `tracking.metrics` selects several."""
CHOICE_SCHEMAS = {"precision": PrecisionConfig}
"""Config groups whose choices are files of conf/ and components, and type of the specification."""

_Type = typing.TypeVar("_Type")


@dataclasses.dataclass(frozen=True)
class Component:
    """A kind of a part of the program."""

    section: str
    """Section of the configuration, such as `model.attention`."""
    kind: str
    """Value of the section's key that selects the component."""
    summary: str
    """Line of the documentation."""
    spec: Any
    """Specification without torch."""
    settings: type | None = None
    """Dataclass of the settings at `<section>.<kind>`; None: it has none."""
    implementation: Any = None
    """Torch module, class or function; None until its module is imported."""
    base: str | None = None
    """Kind of the section whose settings the component uses too; None: no other."""


_components: dict[tuple[str, str], Component] = {}
_schema_copies: dict[type, CopiedConfig | None] = {}
"""Configuration of the last dataclass; None: it was created once."""


def register_component(
    section: str,
    kind: str,
    summary: str,
    spec: Any = None,
    settings: type | None = None,
    implementation: Any = None,
    base: str | None = None,
) -> None:
    """Add a component that `<section>.<key>=<kind>` selects; see `Component` for the arguments.

    In a section of `CHOICE_SCHEMAS`, `<section>=<kind>` selects it.

    Raises:
        ConfigError: There is no such section, the kind is not a name or has been registered, the
            base is unknown, a setting has no default, or the specification of a choice has another
            type.
    """
    if section not in SELECTORS and section not in CHOICE_SCHEMAS:
        sections = ", ".join([*SELECTORS, *CHOICE_SCHEMAS])
        raise ConfigError(f"{section!r} has no components; register one in {sections}")
    if not kind.isidentifier():
        raise ConfigError(f"the kind {kind!r} of {section} is not a name of letters, digits and _")
    if (section, kind) in _components or kind in _list_files(section):
        raise ConfigError(f"{section} already has a component {kind}; choose another name")
    if base is not None and (section, base) not in _components:
        raise ConfigError(f"the base of {section}={kind}: {format_unknown_kind(section, base)}")
    if settings is not None and (problem := _find_settings_problem(settings)):
        raise ConfigError(f"the settings of {section}={kind}: {problem}")
    if (schema := CHOICE_SCHEMAS.get(section)) is not None and not isinstance(spec, schema):
        raise ConfigError(f"the specification of {section}={kind} is no {schema.__name__}")
    component = Component(section, kind, summary, spec, settings, implementation, base)
    _components[section, kind] = component


def list_base_kinds(section: str, kind: str) -> list[str]:
    """Return a kind, its base, the base of that, and so on; an unknown kind has no base."""
    component = _components.get((section, kind))
    base = None if component is None else component.base
    return [kind, *([] if base is None else list_base_kinds(section, base))]


def set_implementation(section: str, kind: str, implementation: Any) -> None:
    """Set the implementation of a component whose specification is in another module."""
    component = _components[section, kind]
    _components[section, kind] = dataclasses.replace(component, implementation=implementation)


def get_component(section: str, kind: str) -> Component:
    """Return a component.

    Raises:
        ConfigError: There is none of this kind.
    """
    try:
        return _components[section, kind]
    except KeyError:
        raise ConfigError(format_unknown_kind(section, kind)) from None


def get_spec(section: str, kind: str) -> Any:
    """Return the specification of a component."""
    return get_component(section, kind).spec


def get_implementation(section: str, kind: str) -> Any:
    """Return the implementation of a component, after its module was imported."""
    implementation = get_component(section, kind).implementation
    assert implementation is not None, f"the module of {section} {kind} is not imported"
    return implementation


def list_components(section: str | None = None) -> list[Component]:
    """Return all components, or those of a section."""
    return [one for one in _components.values() if section in (None, one.section)]


def list_group_choices(group: str) -> list[str]:
    """Return the choices of a config group: files of conf/, and components."""
    components = list_components(group) if group in CHOICE_SCHEMAS else []
    return sorted([*list_choices(group), *(component.kind for component in components)])


def format_unknown_kind(section: str, kind: str) -> str:
    """Return the message for a kind that no component has."""
    kinds = [component.kind for component in list_components(section)]
    near = difflib.get_close_matches(kind, kinds, 1)
    hint = f"did you mean {near[0]}?" if near else f"kinds: {', '.join(kinds) or 'none'}"
    return (
        f"{section}.{SELECTORS[section]}={kind} is unknown; {hint}; a kind of an extension needs "
        "extensions=[FILE]"
    )


def format_kinds() -> str:
    """Return the kinds of each key that selects components, and the settings of each kind."""
    lines = []
    for section, key in SELECTORS.items():
        found = list_components(section)
        if found:
            lines.append(f"{section}.{key}: {', '.join(sorted(one.kind for one in found))}")
        for component in found:
            settings = () if component.settings is None else dataclasses.fields(component.settings)
            names = (f"{section}.{component.kind}.{setting.name}" for setting in settings)
            lines += [f"  {name}" for name in names]
    return "\n".join(lines)


def find_component_problems(config: Any) -> Iterator[str]:
    """Yield a message for each unknown kind, and for settings of kinds that are not selected."""
    for section, key in SELECTORS.items():
        values, kinds = _get_section(config, section), _list_selected(config, section)
        used = {used for kind in kinds for used in list_base_kinds(section, kind)}
        for kind in kinds:
            if (section, kind) not in _components:
                yield format_unknown_kind(section, kind)
        for component in list_components(section):
            settings = getattr(values, component.kind, None)
            is_set = component.settings is not None and settings != component.settings()
            if component.kind not in used and is_set:
                yield (
                    f"the settings {section}.{component.kind} have no effect, since "
                    f"{section}.{key} is {','.join(kinds) or 'empty'}; add "
                    f"{section}.{key}={component.kind} or remove them"
                )


def list_unused_settings(config: Any) -> set[str]:
    """Return the prefixes of the settings of components that a configuration does not select."""
    used = {
        (section, used)
        for section in SELECTORS
        for kind in _list_selected(config, section)
        for used in list_base_kinds(section, kind)
    }
    return {
        f"{section}.{kind}."
        for section, kind in _components
        if section in SELECTORS and (section, kind) not in used
    }


def extend_schema(schema: type[_Type], prefix: str = "") -> type[_Type]:
    """Return a dataclass with the settings of all components in its sections.

    Args:
        schema: Dataclass of the configuration or of a section, returned unchanged if no component
            adds a field.
        prefix: Key of the section, with a dot at its end.
    """
    hints, added = typing.get_type_hints(schema), list[Any]()
    for field in dataclasses.fields(schema):  # type: ignore[arg-type]
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            extended = extend_schema(kind, f"{prefix}{field.name}.")
            if extended is not kind:
                added.append((field.name, extended, dataclasses.field(default_factory=extended)))
    names = {field.name for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
    for component in list_components(prefix.rstrip(".")) if prefix else ():
        if component.settings is not None and component.kind not in names:
            default = dataclasses.field(default_factory=component.settings)
            added.append((component.kind, component.settings, default))
    if not added:
        return schema
    return dataclasses.make_dataclass(
        schema.__name__, added, bases=(schema,), namespace={"__doc__": schema.__doc__}
    )


def create_schema_node(schema: type) -> DictConfig:
    """Return a new configuration of a dataclass; from the second call on, a copy of it.

    A process that needs one configuration makes no copy, which would take half as long.
    """
    if (copies := _schema_copies.get(schema)) is not None:
        return copies.copy()
    with omit_node_copies():
        node: DictConfig = OmegaConf.structured(schema)
    is_repeated = schema in _schema_copies
    _schema_copies.clear()
    _schema_copies[schema] = CopiedConfig(node) if is_repeated else None
    return node


def list_registered() -> set[tuple[str, str]]:
    """Return section and kind of every component."""
    return {*_components}


def remove_components(registered: Collection[tuple[str, str]]) -> None:
    """Remove components, given by section and kind."""
    for key in registered:
        del _components[key]


def _list_files(section: str) -> list[str]:
    """Return the choices of conf/ among which a component would be one."""
    return list_choices(section) if section in CHOICE_SCHEMAS else []


def _list_selected(config: Any, section: str) -> list[str]:
    """Return the kinds that a configuration selects in a section."""
    chosen = getattr(_get_section(config, section), SELECTORS[section])
    return chosen if isinstance(chosen, list) else [chosen]


def _get_section(config: Any, section: str) -> Any:
    for name in section.split("."):
        config = getattr(config, name)
    return config


def _find_settings_problem(settings: type) -> str | None:
    if not dataclasses.is_dataclass(settings):
        return f"{settings.__name__} is not a dataclass; add @dataclass"
    for field in dataclasses.fields(settings):
        factory = field.default_factory
        if field.default is dataclasses.MISSING and factory is dataclasses.MISSING:
            return f"{settings.__name__}.{field.name} has no default value; give it one"
    return None

"""Filter of runs: comparisons of columns, joined with `and`, `or` and `not`.

The text has the grammar of Python expressions, of which comparisons, names, numbers and strings are
accepted and nothing is executed. A single `=` is accepted for `==`, and a text without quotes for a
string: `config.precision.name=mixed and step>=500`.
"""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from hlat.config.config_errors import ConfigError
from hlat.study.index_file import RunList, resolve_columns
from hlat.study.run_row import CONFIG_PREFIX, format_column, get_value, get_value_order

_OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_SINGLE_EQUALS = re.compile(r"""("[^"]*"|'[^']*')|(?<![<>=!])=(?!=)""")
_WORD = re.compile(r"""("[^"]*"|'[^']*')|((?:<=?|>=?|==|!=)\s*)(?=\d*[A-Za-z_])([\w-]+)""")
"""A comparison with a word, such as a name with a minus or a leading digit."""
_CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
_EXAMPLE = "optimizer.beta2=0.99 and step>=500"
_MAX_SHOWN_VALUES = 8


def filter_runs(runs: RunList, expression: str) -> RunList:
    """Return the runs for which an expression is true.

    A run without a value satisfies `!=` only.

    Raises:
        ConfigError: The expression is invalid, or names no column of any run.
    """
    tree = parse_filter(expression)
    names = sorted({column for node in ast.walk(tree) for column in _get_columns(node)})
    columns = dict(zip(names, resolve_columns(runs, names), strict=True))
    needs_settings = any(column.startswith(CONFIG_PREFIX) for column in columns.values())
    settings: list[dict[str, Any]] = runs.settings if needs_settings else [{}] * len(runs.rows)

    def is_match(i: int) -> bool:
        values = {
            name: get_value(runs.rows[i], settings[i], column) for name, column in columns.items()
        }
        return _evaluate(tree, values)

    return runs.select([i for i in range(len(runs.rows)) if is_match(i)])


def format_known_values(runs: RunList, expression: str) -> list[str]:
    """Return the values of each column of an expression in all runs; for one without a match."""
    tree, lines = parse_filter(expression), []
    names = sorted({column for node in ast.walk(tree) for column in _get_columns(node)})
    for column in resolve_columns(runs, names):
        is_setting = column.startswith(CONFIG_PREFIX)
        settings = runs.settings if is_setting else [{}] * len(runs.rows)
        pairs = zip(runs.rows, settings, strict=True)
        values = {format_column(row, each, column) for row, each in pairs}
        shown = sorted(values, key=get_value_order)
        more = ", ..." if len(shown) > _MAX_SHOWN_VALUES else ""
        lines.append(f"{column}: {', '.join(shown[:_MAX_SHOWN_VALUES])}{more}")
    return ["no run matches; values of all runs:", *lines]


def parse_filter(expression: str) -> ast.expr:
    """Return the tree of an expression; raise ConfigError if it is invalid."""
    quoted = _SINGLE_EQUALS.sub(lambda match: match[1] or "==", expression)
    quoted = _WORD.sub(_quote_word, quoted)
    try:
        tree = ast.parse(quoted.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"where={expression}: cannot be read; example: {_EXAMPLE}") from error
    _validate(tree, expression)
    return tree


def _quote_word(match: re.Match[str]) -> str:
    """Return a comparison with a word in quotes; numbers such as 1e-3 are none."""
    if match[1]:
        return match[1]
    try:
        float(match[3])
    except ValueError:
        return f'{match[2]}"{match[3]}"'
    return match[0]


def _validate(node: ast.expr, expression: str) -> None:
    if isinstance(node, ast.BoolOp):
        for value in node.values:
            _validate(value, expression)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        _validate(node.operand, expression)
    elif not (
        isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and type(node.ops[0]) in _OPERATORS
        and _get_columns(node)
        and _is_value(node.comparators[0])
    ):
        raise ConfigError(
            f"where={expression}: {ast.unparse(node)} is not a comparison of a column and a "
            f"value; example: {_EXAMPLE}"
        )


def _is_value(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def _get_columns(node: ast.AST) -> list[str]:
    """Return the column of a comparison; empty for other nodes."""
    if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Name | ast.Attribute):
        return []
    text = ast.unparse(node.left)
    return [text] if re.fullmatch(r"[\w.]+", text) else []


def _evaluate(node: ast.expr, values: dict[str, Any]) -> bool:
    if isinstance(node, ast.BoolOp):
        combine = all if isinstance(node.op, ast.And) else any
        return combine(_evaluate(value, values) for value in node.values)
    if isinstance(node, ast.UnaryOp):
        return not _evaluate(node.operand, values)
    assert isinstance(node, ast.Compare)
    left, right = values[_get_columns(node)[0]], ast.literal_eval(node.comparators[0])
    return _compare(type(node.ops[0]), left, right)


def _compare(operation: type[ast.cmpop], left: Any, right: Any) -> bool:
    if isinstance(right, str) and right.lower() in _CONSTANTS and not isinstance(left, str):
        right = _CONSTANTS[right.lower()]
    if operation in (ast.Eq, ast.NotEq):
        if isinstance(left, bool) != isinstance(right, bool):
            return operation is ast.NotEq
        return _OPERATORS[operation](left, right)
    try:
        return left is not None and _OPERATORS[operation](left, right)
    except TypeError:
        return False

"""The passes over a captured program: their table, the manager that runs them, and the analyses that passes share."""

from mla_compile.pipeline.driver import run as run

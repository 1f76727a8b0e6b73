"""The passes over a captured program, their table, the pass manager, and the analyses that passes share."""

from mla_compile.pipeline.driver import run as run

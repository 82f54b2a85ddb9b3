"""The check inside training frameworks, pytest and torchrun; each module needs its host."""

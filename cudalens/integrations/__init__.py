"""The check inside the engines that people already use; each module needs its host installed."""

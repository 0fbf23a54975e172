"""The part that imports Lightning: strategy, modules, data, callbacks; nothing below it does."""

# Whoever begins with one of our modules gets Lightning before it, and with it the registration: that imports them all.
import lightning.pytorch  # noqa: F401

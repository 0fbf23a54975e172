"""The part that imports Lightning: strategy, modules, data, callbacks; nothing below it does."""

# A first import of one of our modules imports Lightning before it, and so the registration, which imports them all.
import lightning.pytorch  # noqa: F401

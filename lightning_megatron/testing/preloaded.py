"""Work that is done once, in the server from which workers are forked.

Workers run the code that the server has loaded, even if its files change later; so the code's hash is computed there.
"""

from lightning_megatron.lightning.comparison.code import package_digest

package_digest()

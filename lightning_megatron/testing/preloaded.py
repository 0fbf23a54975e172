"""Work that is done once, in the server that workers are forked from.

Workers run the code that the server has loaded, even if its files change meanwhile; so its hash is computed there.
"""

from lightning_megatron.lightning.comparison.code import package_digest

package_digest()

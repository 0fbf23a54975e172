"""Work done once, in the server that workers are forked from.

They have the code that the server has loaded, whatever happens to its files in the meantime, and say so when they are
compared.
"""

from lightning_megatron.lightning.comparison.code import package_digest

package_digest()

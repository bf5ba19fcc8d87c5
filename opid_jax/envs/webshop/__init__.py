"""WebShop in process: the rules of the text environment without browser, server or Java.

See "WebShop" by Yao et al. (https://arxiv.org/abs/2207.01206). Without a data folder it plays on a generated
catalogue.
"""

from opid_jax.envs.webshop.environment import WebShop, make

__all__ = ['WebShop', 'make']

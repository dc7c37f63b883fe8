"""hlat's Hydra launchers and sweeper, installed as hydra_plugins.hlat_launchers.

The code is in modules with a leading underscore: Hydra 1.3 executes all other modules of a plugin
package twice, which would register two classes with the same name.
"""

"""The families of models: what the config.json of each means for how it is built; ``registry.py`` lists them."""

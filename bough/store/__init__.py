"""The model store: models by name, files by content, and what makes a model of a Modelfile or a hub's repository."""

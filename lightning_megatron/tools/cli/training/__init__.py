"""Commands that train and evaluate, through LightningCLI."""

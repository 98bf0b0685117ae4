"""Post-training: a run's settings, the trainer, and the methods it knows nothing of.

    run = load("runs/lora.yaml", overrides=["optimiser.lr=3e-4"])
    train(run)                          # resumes by itself from what lies in run.output

A run is data (`run`), checked against its cards before any weight is read (`plan`). The trainer optimises networks by
their roles; what the loss is, is a method's business (`methods`).
"""

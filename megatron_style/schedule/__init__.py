"""Pure functions of the step: which stage, which text, which learning rate. No torch.

stages: `StageSchedule.plan(step)`, the one question that training asks. blend: how rows are divided among the sources
of the text. passes: how a pass hands out a source as lanes or shuffled segments. random_order: the order of these.
unread: the part of an epoch that is left. learning_rate. Read stages, then blend and passes.
"""

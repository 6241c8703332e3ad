"""Studies: grids of models, methods, tasks, numbers of demonstrations, seeds and orders.

From the file to the results:

    grid          reads the file (`Study`)
    cell_tasks    loads the tasks, and makes the task of each cell
    targets       lists the cells and the checkpoints (`Grid`), each with its path
    folder        what of them is on disk
    conduct       one loop: the missing targets are given to an executor, as units
    unit_runner   runs a unit in this process
    cluster       runs units on workers of Ray, each of which has a `UnitRunner`
    end           the tables, the page and `study.json`
    plan          what `--dry_run` prints
    costs         what trainings took
"""

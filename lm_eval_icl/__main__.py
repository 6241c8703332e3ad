from lm_eval_icl.cli import main

if __name__ == "__main__":
    main()

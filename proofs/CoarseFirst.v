(** * A coarse mask set first, then double-masking

    If the labels under a small covering set agree, they are the answer; if not, another defense decides. *)

From Coq Require Import List Bool Arith Lia.
From PatchCleanser Require Import Images RowCertificate DoubleMasking.
Import ListNotations.

Definition coarse_first (coarse : list label) (fine : label) : label :=
  match coarse with
  | [] => fine
  | first :: _ => if unanimous first coarse then first else fine
  end.

Section Soundness.
  Context {pixel value : Type}.
  Variable F : masked_classifier pixel value label.
  Hypothesis visible : function_of_visible F.
  Variable coarse_masks : list (region pixel).
  Variable R : threat pixel.
  Hypothesis covering : covers coarse_masks R.

  (** The second round: double-masking, challenger masking or any other defense. *)
  Variable fine : image pixel value -> label.

  Definition answer_of_coarse_first (x : image pixel value) : label :=
    coarse_first (one_mask_labels F coarse_masks x) (fine x).

  Theorem coarse_first_keeps_the_label : forall x y,
    (forall l, In l (one_mask_labels F coarse_masks x) -> l = y) ->
    (forall x', attacked R x x' -> fine x' = y) ->
    forall x', attacked R x x' -> answer_of_coarse_first x' = y.
  Proof.
    intros x y Hcoarse Hfine x' Hattack. unfold answer_of_coarse_first, coarse_first.
    destruct (one_mask_labels F coarse_masks x') as [|first rest] eqn:E; [now apply Hfine|].
    destruct (unanimous first (first :: rest)) eqn:Hagree; [|now apply Hfine].
    (* Some coarse mask hides the patch, and its label is y. *)
    destruct Hattack as [patch [HR Hsame]]. destruct (covering patch HR) as [i [Hi Hhides]].
    symmetry. eapply unanimous_labels_are_equal; [exact Hagree|]. rewrite <- E.
    replace y with (F (mask coarse_masks i) x').
    - apply in_map with (f := fun m => F m x'). now apply nth_In.
    - rewrite hidden_patch_changes_no_answer with (patch := patch) (x := x) by assumption.
      apply Hcoarse. apply in_map with (f := fun m => F m x). now apply nth_In.
  Qed.
End Soundness.

(** * The row certificate (core/algorithms.py, certification_flow)

    What a clean image must satisfy, and what is then true of every attacked image. Both algorithms use no more. *)

From Coq Require Import List Bool Arith Lia.
From PatchCleanser Require Import Images.
Import ListNotations.

Section RowCertificate.
  Context {pixel value : Type}.
  Variable F : masked_classifier pixel value label.
  Hypothesis visible : function_of_visible F.
  Variable masks : list (region pixel).
  Variable R : threat pixel.

  (** Every two-mask label is the true one: the paper's Definition 2. *)
  Definition two_mask_correct (x : image pixel value) (y : label) : Prop :=
    forall i j, i < length masks -> j < length masks -> pair_label F masks x i j = y.

  Definition good (x : image pixel value) (y : label) (i : nat) : Prop :=
    forall j, j < length masks -> pair_label F masks x i j = y.

  (** The good masks alone still cover the threat. *)
  Definition row_certified (x : image pixel value) (y : label) : Prop :=
    forall patch, R patch -> exists i, i < length masks /\ hides (mask masks i) patch /\ good x y i.

  Theorem two_mask_correctness_implies_the_row_certificate : forall x y,
    covers masks R -> two_mask_correct x y -> row_certified x y.
  Proof.
    intros x y Hcovers Hcorrect patch HR.
    destruct (Hcovers patch HR) as [i [Hi Hhides]].
    exists i. repeat split; auto. intros j Hj. now apply Hcorrect.
  Qed.

  Theorem some_good_row_survives_the_attack : forall x y x',
    row_certified x y -> attacked R x x' -> exists i, i < length masks /\ good x' y i.
  Proof.
    intros x y x' Hcert [patch [HR Hsame]].
    destruct (Hcert patch HR) as [i [Hi [Hhides Hgood]]].
    exists i. split; [assumption|]. intros j Hj.
    rewrite <- (Hgood j Hj). unfold pair_label.
    apply hidden_patch_changes_no_answer with (patch := patch); auto.
    now apply union_hides_what_the_first_hides.
  Qed.
End RowCertificate.
